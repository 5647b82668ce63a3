"""Sharded runs (FSDP2) on two ranks: the same numbers as whole ones, and folders for checkpoints."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from marey.config.compose import load_config
from marey.core.errors import UserError
from marey.core.files import seal_holds
from marey.training.again import Again
from marey.training.consolidate import consolidate
from marey.training.consolidate import main as consolidate_command
from marey.training.folders import MARKER, VALUES, clean
from marey.training.reading import newest_complete, read_checkpoint
from marey.training.shards import METADATA, load_folder, whole
from marey.training.verify import tree_differences
from tests.distributed import run_ranks

from .conftest import SMALL, Finished, write_store
from .latent_runs import load, one_source

EXACT = "resume.weights_only=false"
SHARED = (
    "accumulate_grad_batches=2",
    "projector.norm_group=2",
    "trainer.precision=64-true",
    "trainer.gradient_clip_val=0.1",
    "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu",
    "checkpoint.every_n_train_steps=1",
    "checkpoint.filename='{step}'",
    "ema.dtype=float64",
    "ema.update_every=1",
    "ema.decay=0.9",
)
PROBED = ("probe.every_n_steps=2", "probe.clips=12")
WITH_VALIDATION = ("trainer.limit_val_batches=1.0", "trainer.val_check_interval=2", "loader.micro_batch_size=1")
CAUSAL = (
    "data.batching.mode=packed",
    "noise=per_sample",
    "loss.normalize_over=step",
    "accumulate_grad_batches=2",
    "trainer.gradient_clip_val=0.01",
    "trainer.precision=64-true",
    "checkpoint.filename='{step}'",
    "model.hidden=20",
    "ema.enabled=true",
    "ema.dtype=float64",
)
TWO = ("trainer.devices=2", "trainer.strategy=fsdp2")


def sitting(folder: Path, config: Any) -> None:
    from marey.training.fit import fit

    folder.mkdir(exist_ok=True)
    fit(
        config,
        run_dir=folder,
        checkpoint_dir=folder / "kept",
        differences=[],
        command=["marey", "train"],
        again=Again(program=["marey", "train"], overrides=[], folder=folder, run_dir=folder),
        say=lambda _line: None,
    )


def encoder(folder: Path, store: Path, *overrides: str) -> None:
    sitting(folder, load_config([*SMALL, f"data.train={store}", *SHARED, *overrides]))


def causal(folder: Path, source: Sequence[str], *overrides: str) -> None:
    sitting(folder, load(*source, *CAUSAL, *overrides))


def start(path: Path) -> tuple[str, ...]:
    return (f"resume.ckpt_path={path}", EXACT)


def on_two_ranks(rank: int, base: Path, store: Path, source: tuple[str, ...]) -> dict[str, Any]:
    """Every sharded sitting, one after the other, in processes that import Lightning once."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    from marey.training.module import TrainingModule

    two = ("loader.batch_size=2", *TWO)
    four = "trainer.max_steps=4"
    encoder(base / "two", store, *two, four, *WITH_VALIDATION, *PROBED, "checkpoint.save_top_k=-1")
    encoder(base / "again", store, *two, four, *WITH_VALIDATION, *start(base / "two/kept/2.ckpt"))
    encoder(base / "from-one", store, *two, four, *start(base / "one/kept/1.ckpt"))
    kept = base / "kept-one"
    encoder(kept, store, *two, "trainer.max_steps=3", "checkpoint.save_top_k=1")
    # The disk of one rank refuses in the middle of a later checkpoint.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    said = ""
    try:
        encoder(kept, store, *two, four, *start(kept / "kept/last.ckpt"))
    except (UserError, SystemExit) as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    forward = TrainingModule._forward

    def poisoned(module: TrainingModule, batch: Any, *, micro_step: int) -> Any:
        output = forward(module, batch, micro_step=micro_step)
        bad = micro_step == 3 and module.global_rank == 1
        return output._replace(loss=output.loss * float("nan")) if bad else output

    setattr(TrainingModule, "_forward", poisoned)  # noqa: B010  # a method, which types forbid to assign
    encoder(base / "skipped", store, *two, "trainer.max_steps=2", "on_nonfinite=skip")
    setattr(TrainingModule, "_forward", forward)  # noqa: B010
    several = ("data.train_batch_size=2", *TWO)
    causal(base / "causal-two", source, *several, "trainer.max_steps=3")
    return {"said": said}


class Ran(NamedTuple):
    base: Path
    store: Path
    said: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What one process and two left behind."""
    base = tmp_path_factory.mktemp("sharded")
    store = base / "small.lance"
    write_store(store, episodes=24)
    (base / "latents").mkdir()
    source = one_source(base / "latents")
    torch.set_num_threads(1)
    encoder(
        base / "one",
        store,
        "loader.batch_size=4",
        "trainer.max_steps=4",
        "checkpoint.save_top_k=-1",
        *WITH_VALIDATION[:2],
        *PROBED,
    )
    causal(base / "causal-one", source, "data.train_batch_size=4", "trainer.max_steps=3")
    found = run_ranks(on_two_ranks, 2, base / "ranks", base, store, source)
    return Ran(base, store, [each["said"] for each in found])


def content(path: Path) -> dict[str, Any]:
    return load_folder(path) if path.is_dir() else dict(torch.load(path, weights_only=True))


def state_of(path: Path) -> dict[str, Any]:
    """Weights, average and optimizer moments by name."""
    found = content(path)
    (optimizer,) = found["optimizer_states"]
    names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
    moments = {f"{names[i]}.{key}": value for i, state in optimizer["state"].items() for key, value in state.items()}
    return {"state_dict": found["state_dict"], "state_dict_ema": found["state_dict_ema"], "moments": moments}


def assert_close(ours: Path, theirs: Path) -> None:
    one, other = state_of(ours), state_of(theirs)
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].keys() == other[key].keys()
        for name, tensor in one[key].items():
            torch.testing.assert_close(other[key][name], tensor, rtol=0, atol=1e-10)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    import csv

    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["two", "from-one"])
def test_sharded_steps_equal_those_of_one_process(ran: Ran, name: str) -> None:
    assert_close(ran.base / "one/kept/last.ckpt", ran.base / name / "kept/last.ckpt")


def test_metrics_and_validation_equal_those_of_one_process(ran: Ran) -> None:
    for file, columns in (
        ("metrics.csv", ("train/loss", "train/sigreg", "clips_seen", "tokens_seen")),
        ("validation.csv", ("val/loss", "val/sigreg")),
    ):
        ours, theirs = rows(ran.base / "one", file), rows(ran.base / "two", file)
        assert len(ours) == len(theirs) >= 2
        for one, two in zip(ours, theirs, strict=True):
            for column in (c for c in columns if c in one):
                assert float(one[column]) == pytest.approx(float(two[column]), rel=1e-10)
    for one, two in zip(rows(ran.base / "one", "metrics.csv"), rows(ran.base / "two", "metrics.csv"), strict=True):
        for column in ("probe/rank", "probe/sigreg"):  # of features in float32
            assert (one[column] != "") == (two[column] != "") == (one["step"] in "124")
            assert one[column] == "" or float(one[column]) == pytest.approx(float(two[column]), rel=1e-4)


def test_a_resume_on_the_same_ranks_is_bit_by_bit_the_run_that_went_on(ran: Ran) -> None:
    for step in (3, 4):
        one, two = (state_of(ran.base / name / f"kept/{step}.ckpt") for name in ("two", "again"))
        assert list(tree_differences(one, two)) == []


def test_one_process_goes_on_from_shards(ran: Ran) -> None:
    moved = ran.base / "moved"
    encoder(moved, ran.store, "loader.batch_size=4", "trainer.max_steps=4", *start(ran.base / "two/kept/2.ckpt"))
    assert_close(ran.base / "one/kept/last.ckpt", moved / "kept/last.ckpt")
    assert (moved / "kept/last.ckpt").is_file()
    notes = json.loads((moved / "receipt.json").read_text())["resumed_from"]["notes"]
    assert notes == ["written by 2 ranks, continued by 1: equal within rounding, not bit by bit"]


def test_a_causal_run_divided_over_the_step_equals_one_process(ran: Ran) -> None:
    assert_close(ran.base / "causal-one/kept/last.ckpt", ran.base / "causal-two/kept/last.ckpt")


def test_every_rank_keeps_its_part_of_weights_moments_and_average_alone(ran: Ran) -> None:
    folder = ran.base / "two/kept/4.ckpt"
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert abs(sizes[0] - sizes[1]) < 0.05 * sum(sizes)
    tensors = state_of(folder)
    held = sum(t.numel() * t.element_size() for kind in tensors.values() for t in kind.values())
    assert sum(sizes) > held
    assert (folder / VALUES).stat().st_size < 0.1 * held


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(ran: Ran) -> None:
    before, after = (content(ran.base / f"skipped/kept/{step}.ckpt")["state_dict"] for step in (1, 2))
    assert list(tree_differences(before, after)) == []
    assert [row["skipped_steps"] for row in rows(ran.base / "skipped", "metrics.csv")] == ["0", "1"]


def test_the_disk_of_one_rank_ends_all_in_one_sentence_and_leaves_what_there_was(ran: Ran) -> None:
    kept = ran.base / "kept-one/kept"
    assert "4.ckpt cannot be written (File too large); earlier checkpoints are untouched" in ran.said[0]
    assert ran.said[1] == "0"  # rank 1 leaves without a word
    assert sorted(path.name for path in kept.iterdir()) == ["3.ckpt", "last.ckpt"]  # and save_top_k=1 kept one
    assert (kept / "last.ckpt").readlink() == Path("3.ckpt")
    assert whole(kept / "last.ckpt")
    receipt = json.loads((ran.base / "kept-one/receipt.json").read_text())
    assert receipt["status"] == "refused"
    (entry,) = (entry for entry in receipt["checkpoints"] if not entry.get("removed"))
    assert entry["bytes"] == sum(file.stat().st_size for file in (kept / "3.ckpt").iterdir())


def test_consolidated_shards_are_the_file_that_one_process_reads(ran: Ran, tmp_path: Path) -> None:
    from marey.evaluation.loading import load_encoder

    folder, out = ran.base / "two/kept/4.ckpt", tmp_path / "whole.ckpt"
    assert consolidate_command([str(folder), str(out)]) == 0
    assert seal_holds(out)
    assert list(tree_differences(content(folder), content(out))) == []
    assert load_encoder(out, weights="online").info.step == 4
    with pytest.raises(UserError, match=r"whole\.ckpt exists already"):
        consolidate(folder, out)
    assert consolidate_command([str(folder)]) == 2


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("fsdp", "trainer.strategy=fsdp is not supported; sharding is trainer.strategy=fsdp2 here"),
        ("fsdp2", "trainer.strategy=fsdp2 shards a model over ranks and this run has one"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_way_out(
    train: Callable[..., Finished], strategy: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        train("run", f"trainer.strategy={strategy}")


@pytest.mark.parametrize("name", ["2.ckpt", "last.ckpt"])
def test_what_reads_files_alone_says_how_to_make_one(ran: Ran, name: str) -> None:
    from marey.evaluation.inspect import inspect_text
    from marey.evaluation.loading import load_encoder

    folder = ran.base / "two/kept" / name
    for read in (inspect_text, load_encoder):
        with pytest.raises(UserError, match=f"python -m marey.training.consolidate {folder} OUT.ckpt"):
            read(folder)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("__0_0.distcp", flipped, "is damaged"),
        ("__1_0.distcp", Path.unlink, "is damaged"),
        (METADATA, flipped, "is damaged"),
        (VALUES, flipped, "is damaged"),
        (MARKER, Path.unlink, "without the completion marker"),
        (MARKER, lambda file: file.write_text("{"), "is damaged"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_and_the_newest_whole_one_named(
    ran: Ran, tmp_path: Path, file: str, damage: Callable[[Path], Any], reason: str
) -> None:
    for step in (2, 3):
        shutil.copytree(ran.base / f"two/kept/{step}.ckpt", tmp_path / f"{step}.ckpt")
    damage(tmp_path / "3.ckpt" / file)
    for exact in (True, False):
        with pytest.raises(UserError, match=reason) as refused:
            read_checkpoint(tmp_path / "3.ckpt", exact=exact)
        assert str(refused.value).endswith(f"there is resume.ckpt_path={tmp_path}/2.ckpt")
    with pytest.raises(UserError, match="is not a complete and undamaged checkpoint folder"):
        consolidate(tmp_path / "3.ckpt", tmp_path / "out.ckpt")
    assert newest_complete(tmp_path) == tmp_path / "2.ckpt"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_the_list_of_shards_executes_nothing(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import pickle

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bad.ckpt"
    shutil.copytree(ran.base / "two/kept/2.ckpt", folder)
    (folder / METADATA).write_bytes(pickle.dumps(Bomb()))
    marker = json.loads((folder / MARKER).read_text())
    data = (folder / METADATA).read_bytes()
    marker["files"][METADATA] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MARKER).write_text(json.dumps(marker))
    with pytest.raises(UserError, match="would execute code"):
        read_checkpoint(folder, exact=True)
    assert not (tmp_path / "exploded").exists()


def test_what_an_interrupted_write_left_is_removed(ran: Ran, tmp_path: Path) -> None:
    left = tmp_path / ".3.ckpt.0123abcd.tmp"
    shutil.copytree(ran.base / "two/kept/3.ckpt", left)
    assert newest_complete(tmp_path) is None
    (tmp_path / ".last.ckpt.0123abcd.tmp").symlink_to(left.name)
    (tmp_path / ".last.ckpt.89abcdef.tmp").symlink_to("gone.ckpt")
    said = clean([tmp_path])
    assert said is not None
    assert said.startswith("removed 3 files (")
    assert ".3.ckpt.0123abcd.tmp" in said
    assert list(tmp_path.iterdir()) == []
