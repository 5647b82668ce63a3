from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

import marey.pixels.guard as guard_module
import marey.training.loader as loader_module
from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.core.tokens import ViewChunk
from marey.pixels.episodes import EpisodeSource
from marey.pixels.videos import VideoEpisodes
from marey.training.batchplan import batch_plan, validation_steps
from marey.training.data import ClipData, ClipSteps, build_loader, open_train, open_val, validates_on_training_data
from marey.training.kinds.base import open_kind
from marey.training.loader import MicroStepLoader, ignored_settings

from ..pixels.conftest import make_video
from .conftest import write_store
from .latent_runs import load as load_causal
from .latent_runs import one_source

Configure = Callable[..., EncoderConfig]


@pytest.fixture
def opened() -> Iterator[list[MicroStepLoader]]:
    """Loaders whose workers end with the test."""
    loaders: list[MicroStepLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()


def make(config: EncoderConfig, opened: list[MicroStepLoader], *, world: int = 1, rank: int = 0) -> MicroStepLoader:
    data = open_train(config)
    plan = batch_plan(config, data.clips, world_size=world)
    assert plan.micro_steps_per_epoch is not None
    loader = build_loader(
        data, config, plan=plan, micro_steps=plan.micro_steps_per_epoch, pin_memory=False, fixed_epoch=False
    )
    loader.rank = rank
    opened.append(loader)
    return loader


def identities(batch: list[ViewChunk]) -> list[list[int]]:
    return [row for chunk in batch for row in chunk.clips.tolist()]


def same(a: list[ViewChunk], b: list[ViewChunk]) -> bool:
    left = [t for chunk in a for t in (*chunk.views_global, *chunk.views_local, chunk.clips)]
    right = [t for chunk in b for t in (*chunk.views_global, *chunk.views_local, chunk.clips)]
    return len(left) == len(right) and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def test_an_epoch_visits_every_clip_once_and_the_next_in_another_order(
    small: Configure, opened: list[MicroStepLoader]
) -> None:
    loader = make(small(), opened)
    first = [row for batch in loader for row in identities(batch)]
    second = [row for batch in loader for row in identities(batch)]
    assert len(loader) == 6
    assert [row[3:] for row in first] == [[0, position] for position in range(24)]
    assert [row[3:] for row in second] == [[1, position] for position in range(24)]
    assert sorted(row[1] for row in first) == list(range(24))
    assert [row[1] for row in first] != [row[1] for row in second]


def test_starting_anywhere_delivers_what_a_whole_run_delivers_there(
    small: Configure, opened: list[MicroStepLoader]
) -> None:
    whole = make(small(), opened)
    stream = [batch for _ in range(2) for batch in whole]
    for start in range(12):
        loader = make(small(), opened)
        loader.start_at(epoch=start // 6, micro_step=start % 6)
        tail = [batch for _ in range(2 - start // 6) for batch in loader]
        assert len(tail) == 12 - start
        assert all(same(a, b) for a, b in zip(tail, stream[start:], strict=True))


def test_a_position_at_an_epochs_end_is_the_next_epochs_start(small: Configure, opened: list[MicroStepLoader]) -> None:
    loader = make(small(), opened)
    for _ in loader:
        last = loader.state_dict()
    assert last == {"epoch": 1, "micro_step": 0}
    loader.load_state_dict({"epoch": 0, "micro_step": 6})
    assert loader.state_dict() == last


@pytest.mark.parametrize("persistent", ["true", "false"])
def test_workers_change_nothing_and_outlive_an_epoch_when_asked(
    small: Configure, opened: list[MicroStepLoader], persistent: str
) -> None:
    whole = make(small("loader.micro_batch_size=2"), opened)
    alone = [*whole, *whole]
    loader = make(
        small(
            "loader.micro_batch_size=2",
            "loader.num_workers=2",
            f"loader.persistent_workers={persistent}",
        ),
        opened,
    )
    helped = list(loader)
    pids = worker_pids(loader)
    helped += list(loader)
    assert len(helped) == 12
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))
    assert worker_pids(loader) == pids
    assert len(pids) == (2 if persistent == "true" else 0)


def worker_pids(loader: MicroStepLoader) -> list[int]:
    return [worker.pid for worker in getattr(loader._stream, "_workers", [])]


def test_ranks_take_consecutive_blocks_of_one_order(small: Configure, opened: list[MicroStepLoader]) -> None:
    whole = list(make(small("loader.batch_size=8"), opened))
    ranks = [list(make(small("loader.batch_size=4"), opened, world=2, rank=rank)) for rank in range(2)]
    for step, batch in enumerate(whole):
        assert identities(batch) == identities(ranks[0][step]) + identities(ranks[1][step])


def test_limits_are_whole_optimizer_steps(small: Configure, opened: list[MicroStepLoader]) -> None:
    assert len(make(small("trainer.limit_train_batches=5", "accumulate_grad_batches=2"), opened)) == 4
    assert len(make(small("trainer.limit_train_batches=0.5"), opened)) == 3


def test_too_little_data_names_the_numbers_and_the_ways_out(small: Configure, opened: list[MicroStepLoader]) -> None:
    with pytest.raises(UserError, match=r"24 clips per epoch and one optimizer step takes 32 .*clips_per_video=2"):
        make(small("loader.batch_size=32"), opened)


def test_a_stalled_worker_is_named_with_what_it_was_reading(
    small: Configure, opened: list[MicroStepLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("loader.num_workers=1", "loader.timeout=1")
    data = open_train(config)
    stuck = ClipData(sources=data.sources, dataset=Stuck(data.dataset, 3600), clips_per_video=data.clips_per_video)  # type: ignore[arg-type]
    loader = loader_of(stuck, config, opened)
    with pytest.raises(UserError, match=r"no clips came for loader.timeout=1 seconds while reading episode \d+"):
        next(iter(loader))


@pytest.mark.parametrize("fault", ["hang", "die", "die with a lock"])
def test_of_two_workers_the_one_at_fault_names_the_file_it_is_at(
    small: Configure,
    opened: list[MicroStepLoader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader_module, "MAX_DEATHS", 0)
    for name in "abcdefgh":
        make_video(tmp_path / "videos" / f"{name}.mp4", frames=12, rate=15)
    words = (f"data.train={tmp_path / 'videos'}", "data.video_rate=15", "loader.clips_per_video=1")
    # Long enough for workers to start on a busy machine; only the one that hangs makes anybody wait for it.
    config = small(*words, "loader.num_workers=2", f"loader.timeout={15 if fault == 'hang' else 60}")
    data = open_train(config)
    source = data.sources[0]
    plan = batch_plan(config, data.clips, world_size=1)
    steps = ClipSteps(data, config, plan, fixed_epoch=False)
    # Of the second micro-step: both workers are there by then.
    files = [name.partition(" (")[0] for name in steps.files(0, 1, 0, 0)]
    assert len(files) == 4
    source.__class__ = Disk
    source.bad, source.fault = files[2], fault  # type: ignore[attr-defined]
    loader = build_loader(data, config, plan=plan, micro_steps=2, pin_memory=False, fixed_epoch=False)
    opened.append(loader)
    with pytest.raises(UserError, match=rf"while reading {files[2]}(;| \()") as caught:
        list(loader)
    assert not any(name in str(caught.value) for name in (*files[:2], files[3]))


class Disk(VideoEpisodes):
    """Videos on a disk that, at one file, does not answer or takes the process with it."""

    bad, fault = "", ""

    def _check_unchanged(self, item: Any) -> None:
        if item.footage.name == self.bad:
            if self.fault == "die with a lock":
                frame = sys._getframe()
                while frame.f_code.co_name != "_worker_loop":
                    frame = cast("FrameType", frame.f_back)
                frame.f_locals["done_event"]._cond.acquire()  # all workers and the loader itself ask for it
            if self.fault != "hang":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        super()._check_unchanged(item)


def test_a_worker_that_dies_costs_nothing_but_time(small: Configure, opened: list[MicroStepLoader]) -> None:
    options = ("loader.micro_batch_size=2", "loader.num_workers=2", "loader.timeout=600", "loader.prefetch_factor=1")
    whole = list(make(small("loader.micro_batch_size=2"), opened))
    loader = make(small(*options), opened)
    said: list[str] = []
    loader.say = said.append
    got = []
    for batch in loader:
        got.append(batch)
        if len(got) in (1, 4):
            os.kill(worker_pids(loader)[len(got) % 2], signal.SIGKILL)
    assert len(got) == 6
    assert all(same(a, b) for a, b in zip(got, whole, strict=True))
    assert loader.deaths == len(said) == 2
    # One that was idle when it was killed was reading nothing.
    assert all(line.startswith("a loader worker died") for line in said), said


def test_a_worker_that_dies_again_and_again_is_noticed_at_once_and_is_one_sentence(
    small: Configure, opened: list[MicroStepLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "MAX_DEATHS", 1)
    config = small("loader.num_workers=1", "loader.timeout=600")
    data = open_train(config)
    dying = ClipData(sources=data.sources, dataset=Dying(data.dataset), clips_per_video=data.clips_per_video)  # type: ignore[arg-type]
    loader = loader_of(dying, config, opened)
    loader.say = lambda _line: None
    started = time.monotonic()
    with pytest.raises(UserError, match=r"a loader worker died while reading episode .*2 times over.*memory ran out"):
        next(iter(loader))
    assert time.monotonic() - started < 120
    assert loader.deaths == 2


def test_a_refusal_inside_a_worker_arrives_as_its_one_sentence(
    small: Configure, opened: list[MicroStepLoader], tmp_path: Path
) -> None:
    config = small("loader.num_workers=1")
    data = open_train(config)
    refusing = ClipData(sources=data.sources, dataset=Refusing(data.dataset), clips_per_video=data.clips_per_video)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        next(iter(loader_of(refusing, config, opened)))
    assert str(caught.value) == "the disk is gone; plug it in"


def test_a_store_that_changes_under_a_running_job_ends_it_with_one_sentence(
    small: Configure, opened: list[MicroStepLoader], tmp_path: Path
) -> None:
    path = tmp_path / "mine.lance"
    write_store(path, episodes=24)
    config = small(f"data.train={path}", "loader.num_workers=1", "loader.persistent_workers=false")
    loader = make(config, opened)
    assert len(list(loader)) == 6
    shutil.rmtree(path)
    write_store(path, episodes=24)  # of the same size and version number, and another store all the same
    with pytest.raises(UserError) as caught:
        next(iter(loader))
    assert str(caught.value).startswith(f"{path} changed or went away while it was in use (another store lies there")
    shutil.rmtree(path)
    with pytest.raises(UserError, match="changed or went away while it was in use"):
        next(iter(make_again(loader)))


def make_again(loader: MicroStepLoader) -> MicroStepLoader:
    loader.close()
    return loader


def test_a_decoder_that_hangs_in_training_costs_its_clips_and_after_a_resume_the_same_ones_stand_in(
    small: Configure, opened: list[MicroStepLoader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    for name in ("a", "hang", "dies", "d"):
        make_video(tmp_path / "videos" / f"{name}.mp4", frames=12, rate=15)
    (tmp_path / "faulty.py").write_text(
        "import os, signal, time\n"
        "from marey.pixels.framejob import read_frames as whole\n"
        "def read_frames(payload, tick):\n"
        "    path = '' if payload['opens'] is None else payload['opens'][0]\n"
        "    if path.endswith('hang.mp4'):\n"
        "        time.sleep(3600)\n"
        "    if path.endswith('dies.mp4'):\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return whole(payload, tick)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(guard_module, "JOB", "faulty:read_frames")
    options = [
        f"data.train={tmp_path / 'videos'}",
        "data.video_rate=15",
        "loader.clips_per_video=1",
        "loader.batch_size=2",
        "loader.timeout=2",
    ]

    def opened_at(micro_step: int) -> list[list[ViewChunk]]:
        config = small(*options)
        data = open_train(config)
        plan = batch_plan(config, data.clips, world_size=1)
        loader = build_loader(data, config, plan=plan, micro_steps=2, pin_memory=False, fixed_epoch=False)
        opened.append(loader)
        loader.start_at(epoch=0, micro_step=micro_step)
        return list(loader)

    whole = opened_at(0)
    reasons = [reason for batch in whole for chunk in batch for reason in chunk.reasons]
    assert any("hang.mp4: no new frame for 0.5 s, so the decoder was stopped" in reason for reason in reasons)
    assert any("dies.mp4: the decoder died (SIGSEGV)" in reason for reason in reasons)
    replaced = [row for batch in whole for chunk in batch for row in chunk.replaced.tolist()]
    assert len(replaced) == len(reasons) == 2
    assert all(source == 0 and wanted != stand_in for source, wanted, stand_in in replaced)
    # With nothing remembered of the first micro-step, as in another worker or another sitting.
    assert all(same(a, b) for a, b in zip(opened_at(1), whole[1:], strict=True))


@pytest.mark.parametrize("on_bad_clip", ["stop", "replace"])
def test_a_sidecar_that_vanishes_under_a_causal_run_ends_it_by_name_or_is_replaced(
    opened: list[MicroStepLoader], tmp_path: Path, on_bad_clip: str
) -> None:
    config = load_causal(
        *one_source(tmp_path), f"data.on_bad_clip={on_bad_clip}", "data.train_batch_size=2", "loader.num_workers=1"
    )
    loader = open_kind(config, validates=False).train_loader(pin_memory=False)
    opened.append(loader)
    batches = iter(loader)
    next(batches)
    gone = {path.name for path in tmp_path.glob("a?.npy")}
    for name in gone:
        (tmp_path / name).unlink()
    if on_bad_clip == "stop":
        with pytest.raises(UserError, match=r"clip a/a\d \(.*a\d\.npy\): the file does not exist; restore it"):
            list(batches)
        return
    replaced = [item for batch in batches for _, item in batch.replaced]
    assert replaced
    assert all("the file does not exist" in item.reason for item in replaced)
    assert {f"{item.asked.clip_id}.npy" for item in replaced} <= gone
    assert not {f"{item.used.clip_id}.npy" for item in replaced} & gone


def loader_of(data: ClipData, config: EncoderConfig, opened: list[MicroStepLoader]) -> MicroStepLoader:
    plan = batch_plan(config, 24, world_size=1)
    loader = build_loader(data, config, plan=plan, micro_steps=6, pin_memory=False, fixed_epoch=False)
    opened.append(loader)
    return loader


class Wrapped:
    """A dataset that behaves like another one up to its reading."""

    def __init__(self, dataset: Any) -> None:
        self.sizes, self.indexes, self.clips_per_video = dataset.sizes, dataset.indexes, dataset.clips_per_video


class Stuck(Wrapped):
    def __init__(self, dataset: Any, seconds: float) -> None:
        super().__init__(dataset)
        self.seconds = seconds

    def __getitems__(self, draws: Any) -> Any:
        time.sleep(self.seconds)


class Dying(Wrapped):
    def __getitems__(self, draws: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Refusing(Wrapped):
    def __getitems__(self, draws: Any) -> Any:
        raise UserError("the disk is gone; plug it in")


def test_without_workers_their_settings_are_named_as_having_no_effect(small: Configure) -> None:
    assert ignored_settings(small().loader) == [
        "loader.persistent_workers",
        "loader.prefetch_factor",
        "loader.timeout",
    ]
    assert ignored_settings(small("loader.num_workers=1").loader) == []


def test_a_mixture_keeps_each_sources_own_settings(small: Configure, store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "other.lance", episodes=5, frames=4)
    config = small(
        f"data.train=[{{path: {store}, name: first, clips_per_video: 3}},"
        f"{{path: {tmp_path / 'other.lance'}, pad_short: repeat, frame_stride: 2}}]"
    )
    data = open_train(config)
    assert data.clips == 24 * 3 + 5
    described = data.describe()
    assert [source["clips_per_epoch"] for source in described] == [72, 5]
    assert [source["padded_short"] for source in described] == [0, 5]
    sources: list[EpisodeSource] = data.sources
    assert sources[0].name == "first"


def test_validation_takes_one_clip_an_episode_and_knows_when_it_sees_the_training_data(
    small: Configure, store: Path, tmp_path: Path
) -> None:
    write_store(tmp_path / "val.lance", episodes=5)
    held_out = small("loader.clips_per_video=7", f"data.val={tmp_path / 'val.lance'}")
    assert open_val(held_out).clips == 5
    assert not validates_on_training_data(held_out)
    assert validates_on_training_data(small())
    assert validates_on_training_data(small(f"data.val=[{{path: {store}}}]"))


def test_validation_sees_all_tokens_of_the_views_that_training_sees_a_part_of(small: Configure) -> None:
    config = small("model.token_drop_rate=0.5", "loader.clips_per_video=1")
    draw = (0, 3, 0, 7)
    part, whole = (opened.dataset[draw] for opened in (open_train(config), open_val(config)))
    for dropped, kept in ((part.views_global, whole.views_global), (part.views_local, whole.views_local)):
        assert 2 * dropped.positions.shape[1] == kept.positions.shape[1]
        at = (dropped.positions[:, :, None] == kept.positions[:, None]).all(dim=-1)
        assert at.sum(dim=-1).eq(1).all()  # every training token is one of validation's, and the same picture
        rows = at.int().argmax(dim=-1)[..., None].expand_as(dropped.patches)
        assert torch.equal(kept.patches.gather(1, rows), dropped.patches)


def test_validation_starts_from_the_top_however_far_it_went_before(
    small: Configure, opened: list[MicroStepLoader]
) -> None:
    config = small("trainer.limit_val_batches=1")
    data = open_val(config)
    plan = batch_plan(config, data.clips, world_size=1)
    loader = build_loader(data, config, plan=plan, micro_steps=3, pin_memory=False, fixed_epoch=True, from_the_top=True)
    opened.append(loader)
    first = [identities(batch) for batch, _ in zip(loader, range(2), strict=False)]
    whole = [identities(batch) for batch in loader]
    again = [identities(batch) for batch in loader]
    assert first == whole[:2]
    assert whole == again
    assert len(whole) == 3


def test_validation_is_limited_in_micro_steps(small: Configure) -> None:
    def steps(limit: str, clips: int = 24) -> int:
        return validation_steps(small(f"trainer.limit_val_batches={limit}"), clips, statistic_batch=4)

    assert (steps("1.0"), steps("0.5"), steps("2"), steps("100")) == (6, 3, 2, 6)
    with pytest.raises(UserError, match="leaves none of the 6"):
        steps("0.1")
    with pytest.raises(UserError, match="gives 3 clips and one micro-step takes 4"):
        steps("1.0", clips=3)
