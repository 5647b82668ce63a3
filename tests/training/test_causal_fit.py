"""Causal runs through the one trainer: every mode, exact resume, exposure, gradients that ignore partitions."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.core.errors import UserError
from marey.sampling.exposure import read_exposure
from marey.training.kinds.causal import CausalKind
from marey.training.metrics import TIME_COLUMNS

from .conftest import Finished
from .latent_runs import FPS, SMALL, mixture, one_source, runner, write
from .test_resume import differences, experiment

MODES = ("strict", "padded", "bucket", "packed")
Run = Callable[..., Finished]


@pytest.fixture
def train(tmp_path: Path) -> Run:
    return runner(tmp_path)


def val_losses(done: Finished) -> list[float]:
    with (done.folder / "validation.csv").open(newline="") as file:
        return [float(row["val/loss"]) for row in csv.DictReader(file)]


def resumed(train: Run, name: str, whole: Finished, step: int, *overrides: str) -> Finished:
    path = next(whole.checkpoints.glob(f"*-step-{step:07d}.ckpt"))
    return train(name, *overrides, f"resume.ckpt_path={path}", "resume.weights_only=false")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_says_what_the_heavy_layers_saw(train: Run, tmp_path: Path, mode: str) -> None:
    batch = 1 if mode == "strict" else 4
    done = train(
        "run",
        *one_source(tmp_path),
        f"data.batching.mode={mode}",
        f"data.train_batch_size={batch}",
        "trainer.max_steps=3",
        "trainer.limit_val_batches=2",
    )
    rows = done.rows()
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    shares = [float(row["padding_share"]) for row in rows]
    if mode in ("strict", "packed"):
        assert shares == [0.0, 0.0, 0.0]
        assert all(float(row["attention_utilisation"]) == 1.0 for row in rows)
    elif mode == "padded":
        assert max(shares) > 0
        assert all(float(row["attention_utilisation"]) < 1 for row, share in zip(rows, shares, strict=True) if share)
    assert float(rows[-1]["samples_per_second"]) > 0
    content = done.checkpoint()
    assert {key.partition(".")[0] for key in content["state_dict"]} == {"model"}
    assert content["marey"]["kind"] == "causal"
    assert content["marey"]["preprocessing"]["channels"] == content["marey"]["config"]["model"]["channels"] == 3


def test_modes_share_every_checkpoint_key_and_continue_each_other(train: Run, tmp_path: Path) -> None:
    source = one_source(tmp_path)
    kept: list[Finished] = []
    for mode in ("packed", "padded"):
        start = [f"resume.ckpt_path={kept[-1].newest}"] if kept else []
        kept.append(train(mode, *source, f"data.batching.mode={mode}", "trainer.max_steps=2", *start))
    first, second = (done.checkpoint()["state_dict"] for done in kept)
    assert {key: tensor.shape for key, tensor in first.items()} == {key: t.shape for key, t in second.items()}
    # On the same samples in the same order the two are one computation.
    fresh = train("fresh", *source, "data.batching.mode=padded", "trainer.max_steps=2").checkpoint()["state_dict"]
    for name, tensor in first.items():
        torch.testing.assert_close(fresh[name], tensor, rtol=1e-4, atol=1e-5)


def test_grouping_by_canvas_resumes_exactly_across_epochs_of_unequal_length(train: Run, tmp_path: Path) -> None:
    settings = (
        *mixture(tmp_path),
        "data.batching.mode=packed",
        "data.train_batch_size=3",
        "trainer.max_epochs=-1",
        "trainer.max_steps=24",
        "checkpoint.every_n_train_steps=5",
    )
    whole = train("whole", *settings)
    again = resumed(train, "again", whole, 15, *settings)
    assert differences(experiment(whole.checkpoint()), experiment(again.checkpoint())) == []


def consumed(done: Finished) -> dict[str, Any]:
    return dict(json.loads((done.folder / "receipt.json").read_text())["consumed"])


def test_exposure_is_what_the_model_saw(train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = CausalKind.payload

    def spy(kind: CausalKind, batch: Any) -> Any:
        seen.append(batch.batch)
        return original(kind, batch)

    monkeypatch.setattr(CausalKind, "payload", spy)
    done = train(
        "run", *mixture(tmp_path), "data.train_batch_size=3", "trainer.max_epochs=1", "data.batching.mode=packed"
    )
    recount: Counter[tuple[str, str, str]] = Counter()
    for batch in seen:
        cells = batch.latents.shape[1] * batch.latents.shape[3] * batch.latents.shape[4]
        for identity, frames, prefix in zip(batch.identities, batch.lengths, batch.prefixes, strict=True):
            for name, value in (("reached", 1), ("frames", frames), ("supervised", (frames - prefix) * cells)):
                recount[identity.source, identity.clip_id, name] += value
    table = read_exposure(done.folder / "exposure").to_pylist()
    for row in table:
        for name in ("reached", "frames", "supervised"):
            assert row[name] == recount[row["source"], row["clip_id"], name], row
        assert row["seconds"] == pytest.approx(row["frames"] / FPS)
    said = consumed(done)
    for source in said["per_source"]:
        mine = [row for row in table if row["source"] == source["name"]]
        assert source["clips"] == sum(row["reached"] for row in mine)
        for name in ("frames", "tokens", "supervised", "drawn", "repeats", "tail_repeats", "dropped"):
            assert source[name] == sum(row[name] for row in mine), name
    draws = json.loads((done.folder / "receipt.json").read_text())["steps"]["clips_per_epoch"]
    assert sum(row["drawn"] for row in table) == draws
    assert sum(source["share"] for source in said["per_source"]) == pytest.approx(1)
    assert said["tokens"] == sum(source["tokens"] for source in said["per_source"])


def test_exposure_is_exact_across_a_resume_into_the_same_folder(train: Run, tmp_path: Path) -> None:
    settings = (*mixture(tmp_path), "data.train_batch_size=3", "trainer.max_epochs=-1", "trainer.max_steps=9")
    whole = train("whole", *settings)
    table = read_exposure(whole.folder / "exposure")
    resumed(train, "whole", whole, 4, *settings)
    assert read_exposure(whole.folder / "exposure").equals(table)


def test_normalising_over_the_step_makes_the_gradient_independent_of_the_partition(train: Run, tmp_path: Path) -> None:
    settings = (
        *one_source(tmp_path),
        "data.batching.mode=packed",
        "noise=per_sample",
        "trainer.precision=64-true",
        "trainer.max_steps=3",
        "optimizer.lr=0.01",
        "scheduler.peak_step=0",
        "scheduler.end_lr=0.01",
        "trainer.gradient_clip_val=0.5",
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for over in ("step", "microbatch"):
        for batch, accumulate in ((8, 1), (2, 4), (1, 8)):
            done = train(
                f"{over}-{batch}",
                *settings,
                f"loss.normalize_over={over}",
                f"data.train_batch_size={batch}",
                f"accumulate_grad_batches={accumulate}",
            )
            found.setdefault(over, []).append(done.checkpoint()["state_dict"])
    for other in found["step"][1:]:
        for name, tensor in found["step"][0].items():
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-10)
    assert any(
        not torch.allclose(found["microbatch"][0][name], found["microbatch"][2][name], rtol=0, atol=1e-6)
        for name in found["microbatch"][0]
    )


def test_two_ranks_go_on_with_one_process_of_twice_the_batch_and_back(train: Run, tmp_path: Path) -> None:
    settings = (
        *one_source(tmp_path),
        "data.batching.mode=packed",
        "noise=per_sample",
        "loss.normalize_over=step",
        "trainer.precision=64-true",
        "trainer.val_check_interval=3",
        "trainer.limit_val_batches=1.0",
    )
    alone = train("alone", *settings, "data.train_batch_size=4", "trainer.max_steps=3")
    longer = train("longer", *settings, "data.train_batch_size=4", "trainer.max_steps=5")
    run, kept = tmp_path / "two", tmp_path / "kept"
    shutil.copytree(alone.folder, run)  # as one process left it, three steps on
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parents[2] / "main.py"),
            "--config-name=causal_video",
            *SMALL,
            *settings,
            "trainer.max_steps=3",
            "data.train_batch_size=2",
            "trainer.devices=2",
            "trainer.strategy=ddp",
            f"resume.ckpt_path={alone.checkpoints}/epoch-0000-step-0000001.ckpt",
            "resume.weights_only=false",
            f"hydra.run.dir={run}",
            f"checkpoint.dirpath={kept}",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = Finished(run, kept, done.stdout.splitlines(), None)
    ours, theirs = alone.checkpoint(), two.checkpoint()
    assert theirs["marey"]["world_size"] == 2
    for name, tensor in ours["state_dict"].items():
        torch.testing.assert_close(theirs["state_dict"][name], tensor, rtol=0, atol=1e-10)
    for one, other in zip(alone.rows(), two.rows(), strict=True):
        assert one["samples_seen"] == other["samples_seen"]
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-10)
    table = read_exposure(alone.folder / "exposure")
    assert read_exposure(two.folder / "exposure").equals(table)
    assert val_losses(alone) == [pytest.approx(value, rel=1e-10) for value in val_losses(two)] != []
    back = (*settings, "data.train_batch_size=4", "trainer.max_steps=5")
    moved = resumed(train, "moved", two, 3, *back)
    for name, tensor in longer.checkpoint()["state_dict"].items():
        torch.testing.assert_close(moved.checkpoint()["state_dict"][name], tensor, rtol=0, atol=1e-10)
    for setting, key, needed in (
        ("noise=collated", "noise", "noise=per_sample"),
        ("loss.normalize_over=microbatch", "loss", "loss.normalize_over=step"),
    ):
        with pytest.raises(UserError, match=f"was written by 2 ranks and continues on 1, which needs {needed}"):
            resumed(train, "refused", two, 3, *back, setting, f"resume.allow_changes=[{key}]")


def test_validation_is_weighted_by_elements_whatever_the_batch(train: Run, tmp_path: Path) -> None:
    found = []
    for batch in (1, 3):
        done = train(
            f"val-{batch}",
            *one_source(tmp_path),
            "data.batching.mode=packed",
            "trainer.max_epochs=1",
            "trainer.limit_val_batches=1.0",
            f"data.val_batch_size={batch}",
        )
        found.append(val_losses(done)[-1])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_clip_that_cannot_be_read_is_replaced_and_counted(train: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "c", 40, broken=[3, 10])
    done = train("run", f"data.train={path}", "data.on_bad_clip=replace", "trainer.max_epochs=1")
    (source,) = consumed(done)["per_source"]
    table = read_exposure(done.folder / "exposure").to_pylist()
    assert source["replaced"] == sum(row["replaced"] for row in table) > 0
    assert sum("replaced a clip that cannot be read" in line for line in done.lines) == source["replaced"]


def test_frames_are_encoded_once_into_the_cache(
    train: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    settings = (
        f"data.train={store}",
        "data.name=drift",
        "data.codec.options={patch: 10}",
        "data.text_conditioning=task_prompt",
        "trainer.max_steps=1",
    )
    done = train("run", *settings)
    (manifest,) = (tmp_path / "cache").rglob("manifest.csv")
    before = manifest.stat().st_mtime_ns
    train("again", *settings)
    assert manifest.stat().st_mtime_ns == before
    said = json.loads((done.folder / "receipt.json").read_text())["data"]["train"][0]
    assert (said["name"], said["path"]) == ("drift", str(manifest))
    assert 0 < said["clips"] < 24  # the rest is held out
    about = done.checkpoint()["marey"]
    assert about["config"]["data"]["train"] == str(store)
    assert about["preprocessing"]["codec"]["name"] == "patch"
    assert about["preprocessing"]["codec"]["options"] == {"patch": 10}
    assert about["preprocessing"]["codec"]["fingerprint"] == "patch-1 patch=10"
    assert about["preprocessing"]["channels"] == 300


def test_text_is_conditioned_on_and_its_encoder_recorded(train: Run, tmp_path: Path) -> None:
    done = train(
        "run",
        *one_source(tmp_path),
        "data.text_conditioning=task_prompt",
        "program.text_dropout=0.5",
        "data.batching.mode=packed",
        "trainer.max_steps=2",
    )
    content = done.checkpoint()
    assert content["marey"]["preprocessing"]["text"]["fingerprint"].startswith("hashing-1")
    assert "blank_text" in content["state_dict"]


def test_the_chunked_program_trains_on_strict(train: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "long", 30, lengths=(9, 12))
    done = train(
        "run",
        f"data.train={path}",
        "program.name=chunked_conditioned",
        "data.batching.mode=strict",
        "data.train_batch_size=1",
        "trainer.max_steps=2",
    )
    assert len(done.rows()) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.batching.mode=packed", "data.batching.max_tokens=8"], "alone has .* video tokens, more than"),
        (["model.channels=4"], "model.channels=4 and a/a0 has 3"),
        (["data.train_batch_size=500"], "does not fill one optimizer step of 500"),
        (["data.batching.mode=strict", "data.train_batch_size=4"], "strict batching stacks samples as they are"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    train: Run, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        train("run", *one_source(tmp_path), "trainer.max_steps=2", *overrides)
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_of_the_same_shapes_are_refused(train: Run, tmp_path: Path) -> None:
    source = (*one_source(tmp_path), "trainer.max_steps=1")
    key, start = "program.visibility", f"resume.ckpt_path={train('run', *source).newest}"
    there = (*source, f"{key}=prefix_causal", "program.shift=2", start)
    with pytest.raises(UserError, match=rf"same shapes: {key}: full -> prefix_causal; .*allow_changes=\[{key}\]"):
        train("again", *there)
    accepted = train("again", *there, f"resume.allow_changes=[{key}]")
    said = json.loads((accepted.folder / "receipt.json").read_text())["resumed_from"]
    assert said["allowed_changes"] == ["program.visibility: full -> prefix_causal"]
    assert [line.partition(":")[0] for line in said["notes"]] == ["program.shift"]


def test_what_cannot_be_carried_on_is_refused_even_if_accepted(train: Run, tmp_path: Path) -> None:
    source = (*one_source(tmp_path), "trainer.max_steps=2")
    whole = train("run", *source, "data.train_batch_size=2")
    accepted = "resume.allow_changes=[data.train_batch_size]"
    for words in ([], [accepted]):
        with pytest.raises(UserError, match=r"steps of 2 samples on all .* have 1 \(ranks x data\.train_batch_size"):
            resumed(train, "again", whole, 1, *source, "data.train_batch_size=1", *words)


def test_another_kind_of_checkpoint_is_refused(train: Run, tmp_path: Path) -> None:
    done = train("run", *one_source(tmp_path), "trainer.max_steps=1")
    content = done.checkpoint()
    content["marey"]["kind"] = "encoder"
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="checkpoint of kind encoder and this run is of kind causal"):
        train("again", *one_source(tmp_path), f"resume.ckpt_path={tmp_path / 'other.ckpt'}")


def test_time_columns_are_columns() -> None:
    assert set(TIME_COLUMNS) & set(CausalKind.columns) == {
        "wall_seconds",
        "samples_per_second",
        "tokens_per_second",
        "data_wait_seconds",
    }
