"""Microbatches filled to a budget of tokens, and balanced ranks, through the one trainer and the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.config.causal import CausalConfig
from marey.core.errors import UserError
from marey.objectives.video_program import VideoProgram
from marey.sampling.exposure import read_exposure
from marey.sampling.forecast import forecast
from marey.training.kinds.causal import CausalKind
from marey.training.plan import plan_text
from marey.training.verify import assert_resumes_exactly

from .conftest import Finished
from .latent_runs import SMALL, load, mixture, one_source, runner, write

FILLED = ("data.batching.mode=packed", "data.batching.fill_tokens=64")
Run = Callable[..., Finished]


@pytest.fixture
def train(tmp_path: Path) -> Run:
    return runner(tmp_path)


def test_it_is_restored_at_every_step_bit_for_bit(tmp_path: Path) -> None:
    config = (
        *mixture(tmp_path),
        "data.batching.mode=packed",
        "data.batching.fill_tokens=160",
        "accumulate_grad_batches=2",
        "trainer.max_epochs=-1",
        "trainer.max_steps=8",
        "trainer.log_every_n_steps=2",
        "ema.enabled=true",
    )
    kind = CausalKind(load(*config), validates=False)
    lengths = [kind.planner.micro_steps(epoch) for epoch in range(4)]
    assert sum(lengths[:3]) < 2 * 8  # the run crosses the ends of epochs
    assert len(set(lengths[:3])) > 1
    assert_resumes_exactly(load(*config), tmp_path / "runs", resumed=load(*config, "loader.num_workers=2"))


@pytest.mark.parametrize(
    "batching",
    [
        FILLED,
        (*FILLED, "data.batching.balance=longest_first"),
        ("data.batching.mode=packed", "data.train_batch_size=3", "data.batching.balance=longest_first"),
    ],
)
def test_gradients_of_two_ranks_are_those_of_the_undivided_computation(
    tmp_path: Path, batching: tuple[str, ...]
) -> None:
    """One optimizer step over all microbatches of an epoch, against one forward pass over all of its samples."""
    from marey.batching.transport import collate
    from marey.training.latents import build_reader
    from marey.training.loader import Reader

    settings = ("noise=per_sample", "loss.normalize_over=step", "model.layers=2", "trainer.devices=2")
    config = load(*one_source(tmp_path, clips=60), *batching, *settings)
    kind = CausalKind(config, validates=False)
    reader, gather = build_reader(kind.config)
    dataset: Reader = reader
    program = kind.objective().double()
    assert isinstance(program, VideoProgram)
    with torch.no_grad():  # away from its initial zeros
        for number, parameter in enumerate(program.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    steps = kind.planner.micro_steps(0)
    requests = kind.streams.train.requests
    read = [dataset.__getitems__(requests(0, m, rank)) for m in range(steps) for rank in range(2)]
    assert (len({len(part) for part in read}) > 1) == (batching[:2] == FILLED)

    def backward(batch: Any) -> tuple[float, int]:
        output = program.forward_train_batch(replace(batch, latents=batch.latents.double()), micro_step=0)
        torch.autograd.backward(output.loss)
        return float(output.total), output.elements

    def gradients(elements: int) -> dict[str, torch.Tensor]:
        return {name: p.grad / elements for name, p in program.named_parameters() if p.grad is not None}

    sums = [backward(gather(part).batch) for part in read]
    elements = sum(count for _, count in sums)
    divided = gradients(elements)
    program.zero_grad()
    whole = collate([sample for part in read for sample, _ in part], mode="packed", pad_to_multiple_of=1)
    total, count = backward(whole)
    assert count == elements
    assert sum(value for value, _ in sums) == pytest.approx(total, rel=1e-12)
    undivided = gradients(count)
    scale = max(float(gradient.abs().max()) for gradient in undivided.values())
    assert scale > 0
    for name, gradient in undivided.items():
        assert float((divided[name] - gradient).abs().max()) <= 1e-12 * scale, name


def test_the_forward_pass_of_a_filled_microbatch_may_be_cut_and_gives_the_same(train: Run, tmp_path: Path) -> None:
    settings = (*one_source(tmp_path), *FILLED, "trainer.precision=64-true", "trainer.max_steps=2", "model.layers=2")
    whole = train("whole", *settings).checkpoint()["state_dict"]
    cut = train("cut", *settings, "data.batching.max_tokens=32").checkpoint()["state_dict"]
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=0, atol=1e-12)


def test_exposure_counts_every_draw_of_an_epoch_and_says_what_it_filled(train: Run, tmp_path: Path) -> None:
    done = train("run", *mixture(tmp_path), *FILLED, "accumulate_grad_batches=3", "trainer.max_epochs=1")
    receipt = json.loads((done.folder / "receipt.json").read_text())
    table = read_exposure(done.folder / "exposure").to_pylist()
    steps, batch = receipt["steps"], receipt["batch"]
    assert sum(row["drawn"] for row in table) == steps["clips_per_epoch"]
    assert sum(row["dropped"] for row in table) == steps["dropped_clips_per_epoch"] > 0
    reached = sum(row["reached"] for row in table)
    assert reached == steps["clips_per_epoch"] - steps["dropped_clips_per_epoch"]
    assert batch["fill_tokens"] == 64
    assert batch["statistic_batch"] == round(reached / steps["micro_steps_per_epoch"])
    assert batch["effective_batch"] == 3 * batch["statistic_batch"]
    assert any("filled to 64 video tokens, " in line and "samples per rank on average" in line for line in done.lines)
    rows = done.rows()
    assert int(rows[-1]["samples_seen"]) == reached
    assert int(rows[-1]["tokens_seen"]) == sum(row["tokens"] for row in table)
    assert all(float(row["samples_per_second"]) > 0 for row in rows)


def text_of(*overrides: str) -> str:
    return plan_text([*SMALL, *overrides], config_name="causal_video")


def test_the_plan_counts_tokens_and_says_that_samples_are_an_average(tmp_path: Path) -> None:
    words = (*one_source(tmp_path, clips=200), *FILLED, "trainer.devices=2", "accumulate_grad_batches=2")
    said = text_of(*words)
    kind = CausalKind(load(*words), validates=False)
    counts = kind.planner.counts(0)
    mean = counts.planned / counts.micro_steps
    assert "effective batch  counted in tokens: 2 ranks x 64 at most x 2 accumulated; in samples it differs" in said
    assert f"micro-steps of {mean:.1f} samples on average; of {counts.drawn} draws {counts.dropped} fill no" in said
    found = forecast(kind.planner, program=kind.config.program, patch=2, steps=None)
    assert found.steps_seen == counts.micro_steps <= 64  # so the plan has looked at all of them
    assert f"{found.tokens / 128:.1%} of them used, {mean / 2:.2f} samples on average" in said
    assert f"({found.samples[0]} to {found.samples[1]} in those looked at)" in said
    assert f"{counts.planned:,} samples in all" in said
    assert "of its modelled FLOPs in this mode (data.batching.balance=none)" in said
    assert "padded: " in said


def test_a_batch_size_that_filling_does_not_use_refuses_nothing(tmp_path: Path) -> None:
    words = (*one_source(tmp_path), *FILLED, "data.train_batch_size=500")
    assert "this machine     can run it as asked" in text_of(*words)
    assert CausalKind(load(*words), validates=False).counts.micro_steps > 0


def test_longest_first_shows_in_the_plan(tmp_path: Path) -> None:
    source = (*one_source(tmp_path, clips=200), "data.batching.mode=packed", "data.train_batch_size=4")

    def balance(*words: str) -> float:
        line = next(line for line in text_of(*source, "trainer.devices=4", *words).splitlines() if "modelled" in line)
        return float(line.split("and ")[1].split("%")[0])

    assert balance() < 90 < balance("data.batching.balance=longest_first")


def test_a_window_over_the_budget_is_refused_by_name_before_anything_is_planned(tmp_path: Path) -> None:
    words = (*one_source(tmp_path), "data.batching.mode=packed", "data.batching.fill_tokens=31")
    for act in (lambda: text_of(*words), lambda: CausalKind(load(*words), validates=False)):
        with pytest.raises(UserError, match=r"a/a\d+@0 alone has 32 video tokens, more than .*fill_tokens=31; raise"):
            act()


def test_held_out_windows_are_looked_at_as_ever(tmp_path: Path) -> None:
    def validated(*words: str) -> list[list[int]]:
        config = load(*one_source(tmp_path), *words, "trainer.limit_val_batches=1.0", "data.val_batch_size=3")
        stream = CausalKind(config, validates=True).streams.val
        assert stream is not None
        return [stream.planner.batch_at(0, m, 0).window.tolist() for m in range(stream.planner.micro_steps(0))]

    assert validated(*FILLED, "data.batching.balance=longest_first") == validated("data.batching.mode=packed")


def test_a_manifest_without_height_and_width_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", 40)
    rows = [",".join(line.split(",")[:3]) for line in (tmp_path / "a.csv").read_text().splitlines()]
    (tmp_path / "bare.csv").write_text("\n".join(rows) + "\n")
    bare = (f"data.train={tmp_path / 'bare.csv'}", "data.shape_bucketed_batching=false", "data.batching.mode=packed")
    with pytest.raises(UserError, match=r"no columns height and width, which data.batching.balance=longest_first"):
        CausalKind(load(*bare, "data.batching.balance=longest_first"), validates=False)
    with pytest.raises(UserError, match=r"which data.shape_bucketed_batching=true needs|data.batching.fill_tokens"):
        CausalKind(load(*bare, "data.shape_bucketed_batching=true", *FILLED), validates=False)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.batching.fill_tokens=64"], "fill_tokens=64 needs data.batching.mode=packed, not bucket"),
        (["data.batching.fill_tokens=0", "data.batching.mode=packed"], "data.batching.fill_tokens=0 is not allowed"),
        ([*FILLED, "data.shape_bucketed_batching=false"], "fill_tokens=64 gives each microbatch one canvas"),
        (["data.batching.balance=longest_first"], "balance=longest_first needs data.batching.mode=packed, not bucket"),
        (["data.batching.balance=longest", "data.batching.mode=packed"], "data.batching.balance"),
        (
            ["program.name=chunked_conditioned", "data.batching.mode=strict", "data.batching.fill_tokens=64"],
            "fill_tokens=64 needs data.batching.mode=packed, not strict",
        ),
        ([*FILLED, "program.name=chunked_conditioned"], "works on data.batching.mode=strict alone, not packed"),
    ],
)
def test_what_cannot_be_is_refused_while_the_configuration_is_read(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        load("data.train=a.csv", *overrides)
    assert "\n" not in str(caught.value)


def test_it_is_told_apart_from_the_reference_and_another_world_size_cannot_go_on_exactly(tmp_path: Path) -> None:
    words = (*one_source(tmp_path), *FILLED, "noise=per_sample", "loss.normalize_over=step")
    kind = CausalKind(load(*words), validates=False)
    assert kind.published_differences()[0]["restore"] == "data.batching.fill_tokens=null"
    problem = kind.partition_problem(old_world=2)
    assert problem is not None
    assert "which needs data.batching.fill_tokens=null from the start" in problem


def test_an_older_configuration_without_the_keys_is_read() -> None:
    config = load("data.train=a.csv").model_dump(mode="json")
    for key in ("fill_tokens", "balance"):
        del config["data"]["batching"][key]
    read = CausalConfig.model_validate(config)
    assert (read.data.batching.fill_tokens, read.data.batching.balance) == (None, "none")
