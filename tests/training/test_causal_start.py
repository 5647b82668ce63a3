"""What a causal run settles before its first step, and what it says of validation, tokens and bad clips."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marey.core.errors import UserError
from marey.objectives.video_program import VideoProgram
from marey.sampling.exposure import read_exposure
from marey.training.kinds.causal import CausalKind
from marey.training.latents import LatentSteps, Walk, build_reader, open_streams
from marey.training.plan import plan_text

from .latent_runs import SMALL, load, one_source, write
from .test_causal_fit import Run, consumed, train

__all__ = ["train"]


def opened(*overrides: str, validates: bool = False) -> CausalKind:
    return CausalKind(load(*overrides), validates=validates)


def test_a_damaged_codec_record_is_refused_before_the_first_step(tmp_path: Path) -> None:
    source = one_source(tmp_path)
    (tmp_path / "codec.json").write_text('{"format": 1, "na')
    with pytest.raises(UserError, match=r"codec\.json is not a readable codec record"):
        opened(*source)
    (tmp_path / "codec.json").write_text('{"format": 1, "name": "patch", "options": {"patch": 4}}')
    codec = opened(*source).preprocessing()["codec"]
    assert (codec["name"], codec["options"]) == ("patch", {"patch": 4})


def test_every_source_of_either_side_has_the_channels_of_the_first(tmp_path: Path) -> None:
    a, other = write(tmp_path, "a", 12), write(tmp_path, "other", 12, channels=5)
    both = f"data.sources=[{{name: a, manifest: {a}}}, {{name: other, manifest: {other}, weight: %s}}]"
    with pytest.raises(UserError, match=r"a/a.* has 3 channels and other/other.* has 5; encode all sources with one"):
        opened(both % 1)
    opened(both % 0)  # never drawn
    held_out = (f"data.train={a}", f"data.val={other}", "trainer.limit_val_batches=2")
    with pytest.raises(UserError, match="has 3 channels and other/other0 has 5"):
        opened(*held_out, validates=True)


def test_validation_is_held_to_the_token_budget_and_to_batches_that_stack(tmp_path: Path) -> None:
    small, large = write(tmp_path, "s", 12, lengths=(3,)), write(tmp_path, "large", 12, lengths=(8, 5))
    words = (f"data.train={small}", f"data.val={large}", "trainer.limit_val_batches=1.0")
    budget = ("data.batching.mode=packed", "data.batching.max_tokens=12")
    opened(*words, *budget)
    with pytest.raises(UserError, match=r"large/large.* alone has .* video tokens"):
        opened(*words, *budget, validates=True)
    strict = (*words, "data.batching.mode=strict", "data.train_batch_size=1")
    opened(*strict, "data.val_batch_size=1", validates=True)
    with pytest.raises(UserError, match=r"different lengths .* set data.val_batch_size=1"):
        opened(*strict, "data.val_batch_size=3", validates=True)


def test_fewer_held_out_windows_than_ranks_give_every_rank_a_batch_that_counts_once(tmp_path: Path) -> None:
    train_side, val = write(tmp_path, "a", 32), write(tmp_path, "v", 2, lengths=(8,))
    config = load(f"data.train={train_side}", f"data.val={val}", "data.window_stride=8", "trainer.limit_val_batches=8")
    for world in (3, 8):
        streams = open_streams(config, world=world, validates=True)
        assert streams.val is not None
        assert sum(streams.val.planner.windows.sizes) == 2 < world
        steps = LatentSteps(streams.val, per_epoch=1, fixed_epoch=True)
        dataset, collate = build_reader(config)
        counted = 0
        for rank in range(world):
            (asked,) = steps.requests(0, 0, rank)
            assert len(collate(dataset.__getitems__(asked)).batch) == 1
            counted += len(streams.val.planner.batch_at(0, 0, rank).position)
        assert counted == 2


def test_which_windows_are_validated_is_said_and_recorded(train: Run, tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 24, lengths=(3,)), write(tmp_path, "b", 12, lengths=(3,))
    done = train(
        "run",
        f"data.train={a}",
        f"data.val=[{{name: a, manifest: {a}}}, {{name: b, manifest: {b}}}]",
        "trainer.limit_val_batches=6",
        "trainer.max_steps=1",
    )
    said = json.loads((done.folder / "receipt.json").read_text())["data"]["val"]
    assert [source["validated_windows"] for source in said] == [4, 2]
    assert "validation    6 windows, the same each time: a 4 of 24, b 2 of 12" in done.lines


@pytest.mark.parametrize(
    "words",
    [
        ("program.name=prefix_suffix", "program.visibility=full"),
        ("program.name=prefix_suffix", "program.visibility=prefix_causal"),
        ("program.name=chunked_conditioned", "program.chunk_size=[2,2]", "program.chunk_window=[1,1]"),
    ],
)
def test_plan_metrics_and_exposure_count_the_same_tokens(
    train: Run, tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "long", 16, lengths=(9, 12), canvases=((4, 4), (4, 6)))
    overrides = (
        f"data.train={path}",
        "data.batching.mode=strict",
        "data.train_batch_size=1",
        "trainer.max_epochs=1",
        *words,
    )
    outputs: list[Any] = []
    forward = VideoProgram.forward_train_batch

    def spy(program: VideoProgram, batch: Any, *, micro_step: int) -> Any:
        outputs.append(forward(program, batch, micro_step=micro_step))
        return outputs[-1]

    monkeypatch.setattr(VideoProgram, "forward_train_batch", spy)
    done = train("run", *overrides)
    said = consumed(done)
    tokens, steps = said["tokens"], said["optimizer_steps"]
    assert tokens == sum(output.tokens for output in outputs)
    assert sum(source["tokens"] for source in said["per_source"]) == tokens
    assert sum(row["tokens"] for row in read_exposure(done.folder / "exposure").to_pylist()) == tokens
    lines = plan_text([*SMALL, *overrides], config_name="causal_video").splitlines()
    planned = next(line for line in lines if line.startswith("tokens"))
    assert f" {tokens / steps:,.0f} video tokens seen" in planned
    assert f"({tokens / steps:,.0f} of them valid)" in planned
    kind = opened(*overrides)
    from marey.sampling.forecast import forecast

    found = forecast(kind.planner, program=kind.config.program, patch=2, steps=None)
    assert found.pairs == pytest.approx(sum(output.pairs for output in outputs) / steps)


def test_what_is_not_finite_is_listed_as_what_was_read(train: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "c", 40, broken=[3, 10])
    broken = {"c3", "c10"}
    done = train(
        "run",
        f"data.train={path}",
        "data.on_bad_clip=replace",
        "data.train_batch_size=4",
        "data.batching.mode=packed",
        "trainer.max_epochs=1",
        "optimizer.lr=1e30",
        "scheduler.start_lr=1e30",
        "scheduler.end_lr=1e30",
        "on_nonfinite=skip",
        "max_skipped_in_a_row=null",
        "max_skipped_steps=null",
    )
    assert any("replaced a clip that cannot be read" in line for line in done.lines)
    entries = json.loads((done.folder / "nonfinite.json").read_text())
    clips = [clip for entry in entries for part in entry["micro_steps"] for clip in part["clips"]]
    assert clips
    assert all(clip.keys() == {"file", "source", "clip_id", "start", "epoch", "position"} for clip in clips)
    assert not broken & {clip["clip_id"] for clip in clips}


def test_a_record_names_the_stand_in_and_its_start(tmp_path: Path) -> None:
    path = write(tmp_path, "c", 40, lengths=(8, 9), broken=range(7, 40, 3))
    kind = opened(f"data.train={path}", "data.on_bad_clip=replace", "data.train_batch_size=4")
    program = kind.objective()
    assert isinstance(program, VideoProgram)
    replaced = 0
    for micro_step, batch in enumerate(kind.train_loader(pin_memory=False)):
        output = program.forward_train_batch(kind.payload(batch), micro_step=micro_step)
        record = kind.record(batch, output, epoch=0, micro_step=micro_step, rank=0)
        named = [kind.identity(clip) for clip in record.clips.tolist()]
        seen = [(identity.clip_id, identity.start) for identity in batch.batch.identities]
        assert [(clip["clip_id"], clip["start"]) for clip in named] == seen
        replaced += len(batch.replaced)
    assert replaced > 0


def test_a_run_plans_each_epoch_before_a_resume_once() -> None:
    asked: list[int] = []

    def micro_steps(epoch: int) -> int:
        asked.append(epoch)
        return 3 + epoch % 2

    walk = Walk(SimpleNamespace(epochs_vary=True, micro_steps=micro_steps))  # type: ignore[arg-type]
    assert walk.at(12) == (3, 2)
    assert [walk.ends_epoch(m) for m in range(14)] == [m in (2, 6, 9, 13) for m in range(14)]
    assert asked == [0, 1, 2, 3]


def test_one_walk_serves_loader_positions_and_ledger(tmp_path: Path) -> None:
    kind = opened(*one_source(tmp_path))
    assert kind._steps._walk is kind._positions is kind.ledger()._walk


def test_padding_of_short_clips_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.pad_short=repeat has no meaning for latent video"):
        load(*one_source(tmp_path), "data.pad_short=repeat")
    load(*one_source(tmp_path), "data.pad_short=drop")


def test_one_clip_trains_where_nothing_is_validated(train: Run, tmp_path: Path) -> None:
    path = write(tmp_path, "one", 1, lengths=(9,))
    done = train("run", f"data.train={path}", "data.train_batch_size=1", "trainer.max_steps=1")
    assert consumed(done)["clips"] == 1
