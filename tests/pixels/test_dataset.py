from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.core.pixelstats import IMAGENET_MEAN, IMAGENET_STD, normalize_patches
from marey.core.tokens import ViewChunk, grid_positions, keep_indices
from marey.pixels import reading
from marey.pixels.dataset import ClipDataset, EvalClips, build_train_dataset, collate
from marey.pixels.open import open_source
from marey.pixels.store import FrameStore
from marey.pixels.views import draw_view, view_patches
from marey.sampling.order import Draw, EpochPlan, MicroBatchSampler
from tests.pixels.conftest import make_video
from tests.pixels.memory_source import MemorySource


def config_of(*overrides: str) -> EncoderConfig:
    return load_config(["recipe=smoke", *overrides])


def sources_of() -> list[MemorySource]:
    return [MemorySource([12, 3, 9, 10], name="one"), MemorySource([8] * 6, name="two", size=(50, 48))]


MIXTURE = "data.train=[{path: one, clips_per_video: 2}, {path: two}]"


def dataset_of(*overrides: str, sources: Sequence[MemorySource] | None = None) -> ClipDataset:
    return build_train_dataset(config_of(MIXTURE, *overrides), sources_of() if sources is None else sources)


def tensors(chunk: ViewChunk) -> list[torch.Tensor]:
    return [*chunk.views_global, *chunk.views_local, chunk.clips, chunk.replaced]


def same(a: ViewChunk, b: ViewChunk) -> bool:
    return a.reasons == b.reasons and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True)
    )


def join(chunks: Sequence[ViewChunk]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*map(tensors, chunks), strict=True)]


def draws_of(dataset: ClipDataset, stop: int, epoch: int = 0) -> list[Draw]:
    plan = EpochPlan(dataset.sizes, dataset.clips_per_video, seed=0, statistic_batch=4, episode_distinct=True)
    assert len(plan) == len(dataset)
    return plan.draws(epoch, 0, stop)


def test_a_chunk_has_the_shapes_and_types_the_encoder_reads() -> None:
    dataset = dataset_of()
    assert dataset.sizes == [3, 6]
    assert [index.dropped_short for index in dataset.indexes] == [1, 0]
    assert dataset.clips_per_video == [2, 1]
    chunk = dataset.__getitems__(draws_of(dataset, 5))
    # 8 frames of 64 x 64 in patches of 8: 512 tokens, of 32 x 32: 128; a fifth of them kept
    assert chunk.views_global.patches.shape == (5, 102, 192)
    assert chunk.views_global.positions.shape == (5, 102, 3)
    assert chunk.views_local.patches.shape == (10, 26, 192)
    assert chunk.views_local.positions.shape == (10, 26, 3)
    assert chunk.views_global.patches.dtype == chunk.views_local.patches.dtype == torch.uint8
    assert chunk.views_global.positions.dtype == chunk.clips.dtype == torch.int64
    assert chunk.clips.shape == (5, 5)
    assert chunk.replaced.shape == (0, 3)
    assert chunk.reasons == []


def test_every_view_comes_from_its_own_clip_window_and_key() -> None:
    sources = sources_of()
    config = config_of(MIXTURE)
    dataset = build_train_dataset(config, sources)
    draws = draws_of(dataset, 7, epoch=3)
    chunk = dataset.__getitems__(draws)
    for row, draw in enumerate(draws):
        source, episode, start, epoch, position = chunk.clips[row].tolist()
        assert (source, epoch, position) == (draw.source, 3, draw.position)
        assert episode == ([0, 2, 3], range(6))[source][draw.episode]
        assert 0 <= start <= sources[source].lengths[episode] - 8
        frames = torch.stack([sources[source].frame(episode, start + t) for t in range(8)])
        for view in range(3):
            size, grid = ((64, (8, 8, 8)), (32, (8, 4, 4)))[view > 0]
            positions = grid_positions(grid)
            keep = keep_indices(len(positions), 0.8, seed=0, epoch=3, position=position, view=view)
            drawn = draw_view(*sources[source].size, config.augmentation, seed=0, epoch=3, position=position, view=view)
            want = view_patches(frames, drawn, positions[keep], size=size, patch=8, tubelet=1)
            group, at = (chunk.views_global, row) if view == 0 else (chunk.views_local, 2 * row + view - 1)
            assert torch.equal(group.patches[at], want)
            assert torch.equal(group.positions[at], positions[keep])


def test_a_dataset_of_tubes_ships_the_same_places_of_every_frame() -> None:
    sources = sources_of()
    dataset = build_train_dataset(config_of(MIXTURE, "model.token_drop_mode=tube"), sources)
    chunk = dataset.__getitems__(draws_of(dataset, 3, epoch=3))
    for group, side in ((chunk.views_global, 8), (chunk.views_local, 4)):
        assert group.patches.shape[1] == 8 * round(side * side * 0.2)
        for positions in group.positions:
            places = positions[:, 1:].reshape(8, -1, 2)
            assert positions[:, 0].tolist() == sorted(positions[:, 0].tolist())
            assert torch.equal(places, places[:1].expand_as(places))


@given(cuts=st.lists(st.integers(0, 11), max_size=4), reverse=st.booleans())
@settings(max_examples=6, deadline=None)
def test_batch_mates_and_partition_change_nothing(cuts: list[int], reverse: bool) -> None:
    dataset = DATASET
    draws = draws_of(dataset, 12)
    bounds = sorted({0, 12, *cuts})
    parts = [draws[a:b] for a, b in itertools.pairwise(bounds)]
    chunks = [dataset.__getitems__(part) for part in (parts[::-1] if reverse else parts)]
    whole = join([dataset.__getitems__(draws)])
    assert all(torch.equal(a, b) for a, b in zip(join(chunks[::-1] if reverse else chunks), whole, strict=True))


DATASET = dataset_of()


@pytest.mark.timeout(120)
def test_any_number_of_workers_gives_the_same_chunks() -> None:
    broken = MemorySource([9] * 8, name="one", broken=[2, 5])
    dataset = dataset_of("data.train=one", sources=[broken])
    plan = EpochPlan(dataset.sizes, [3], seed=0, statistic_batch=4, episode_distinct=True)
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")

    def chunks(workers: int) -> list[ViewChunk]:
        sampler = MicroBatchSampler(
            plan, epoch=1, first_micro_step=1, micro_steps=3, batch=4, micro_batch=2, world=1, rank=0
        )
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=collate,
            num_workers=workers,
            multiprocessing_context=context if workers else None,
        )
        return list(loader)

    expected = chunks(0)
    assert len(expected) == 6
    assert sum(len(chunk.replaced) for chunk in expected) > 0
    for workers in (1, 2):
        assert all(same(a, b) for a, b in zip(chunks(workers), expected, strict=True))


def test_a_clip_that_cannot_be_read_is_replaced_from_its_own_source_and_counted() -> None:
    sources = sources_of()
    clean = build_train_dataset(config_of(MIXTURE), sources_of())
    sources[1].broken = {1, 4}
    dataset = build_train_dataset(config_of(MIXTURE), sources)
    draws = draws_of(dataset, len(dataset))
    chunk, expected = dataset.__getitems__(draws), clean.__getitems__(draws)
    bad = [row for row, d in enumerate(draws) if d.source == 1 and d.episode in (1, 4)]
    good = [row for row in range(len(draws)) if row not in bad]
    assert torch.equal(chunk.clips[good], expected.clips[good])
    assert torch.equal(chunk.views_global.patches[good], expected.views_global.patches[good])
    assert len(chunk.replaced) == len(chunk.reasons) == len(bad) == 2
    for row, replaced, reason in zip(bad, chunk.replaced.tolist(), chunk.reasons, strict=True):
        source, wanted, stand_in = replaced
        assert (source, wanted) == (1, draws[row].episode)
        assert stand_in not in (1, 4)
        assert chunk.clips[row, :2].tolist() == [1, stand_in]
        assert chunk.clips[row, 4] == draws[row].position
        assert reason.startswith("frame ")
        assert f"of two_{wanted}.mp4" in reason
        assert "is not a JPEG" in reason
    again = build_train_dataset(config_of(MIXTURE), sources)
    assert same(again.__getitems__(draws), chunk)
    # What was learned about broken episodes saves reads and changes nothing.
    before = sum(sources[1].reads)
    assert same(dataset.__getitems__(draws), chunk)
    assert sum(sources[1].reads) - before == 6


def test_a_source_of_which_nothing_can_be_read_ends_with_one_sentence() -> None:
    dataset = dataset_of("data.train=one", sources=[MemorySource([9, 9], name="walks", broken=[0, 1])])
    with pytest.raises(UserError, match=r"walks .*frame \d of walks_\d.mp4 is not a JPEG.*marey ingest"):
        dataset.__getitems__([(0, 0, 0, 1)])


def test_clips_of_one_source_are_read_together() -> None:
    sources = sources_of()
    dataset = build_train_dataset(config_of(MIXTURE), sources)
    draws = draws_of(dataset, 12)
    dataset.__getitems__(draws)
    wanted = [sum(d.source == number for d in draws) for number in (0, 1)]
    # The first clip of all shows how large clips are; then all of a source come in one read.
    assert [source.reads for source in sources] == [[1, n - 1] for n in wanted]
    dataset.__getitems__(draws)
    assert [source.reads[2:] for source in sources] == [[n] for n in wanted]


def test_large_clips_are_read_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = sources_of()
    dataset = build_train_dataset(config_of(MIXTURE), sources)
    draws = draws_of(dataset, 12)
    expected = DATASET.__getitems__(draws)
    clip_bytes = 8 * 3 * 40 * 56
    monkeypatch.setattr(reading, "READ_BYTES", 2 * clip_bytes)
    assert same(dataset.__getitems__(draws), expected)
    assert max(sources[0].reads) == 2


def test_normalising_in_the_worker_or_on_the_device_gives_the_same_numbers() -> None:
    shipped = dataset_of()
    worker = dataset_of("loader.normalize_on_gpu=false")
    draws = draws_of(shipped, 3)
    a, b = shipped.__getitems__(draws), worker.__getitems__(draws)
    for x, y in ((a.views_global, b.views_global), (a.views_local, b.views_local)):
        assert y.patches.dtype == torch.float32
        assert torch.equal(normalize_patches(x.patches), y.patches)


def test_normalising_is_the_published_formula() -> None:
    patches = torch.arange(256, dtype=torch.uint8).repeat(3)[None]  # one patch, R then G then B
    got = normalize_patches(patches, dtype=torch.float64).reshape(3, 256)
    for channel in range(3):
        want = (np.arange(256) / 255 - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        np.testing.assert_allclose(got[channel].numpy(), want, rtol=1e-15, atol=1e-15)
    half = normalize_patches(patches, dtype=torch.bfloat16)
    assert torch.equal(half, normalize_patches(patches).to(torch.bfloat16))


def test_without_local_views_the_local_group_is_empty() -> None:
    dataset = dataset_of("augmentation.local_crops_number=0")
    chunk = dataset.__getitems__(draws_of(dataset, 2))
    assert chunk.views_local.patches.shape[0] == chunk.views_local.positions.shape[0] == 0
    assert chunk.views_global.patches.shape[0] == 2


def test_each_source_of_a_mixture_keeps_its_own_stride_and_rule_for_short_episodes() -> None:
    mixture = "data.train=[{path: one, pad_short: repeat}, {path: two, frame_stride: 1}]"
    dataset = build_train_dataset(config_of(mixture, "frame_stride=2"), sources_of())
    assert [(i.frame_stride, i.padded_short, i.dropped_short) for i in dataset.indexes] == [
        (2, 4, 0),
        (1, 0, 0),
    ]


def jpeg(frame: torch.Tensor) -> bytes:
    return bytes(simplejpeg.encode_jpeg(frame.permute(1, 2, 0).contiguous().numpy(), quality=95))


def test_a_store_of_the_public_columns_trains_and_a_corrupt_frame_costs_one_clip(tmp_path: Path) -> None:
    source = MemorySource([8] * 5)
    rows = [
        {"episode_idx": 10 + e, "step_idx": t, "frame": jpeg(source.frame(e, t)), "h": 40, "w": 56, "label": e}
        for e in range(5)
        for t in range(8)
    ]
    rows[2 * 8 + 3]["frame"] = rows[2 * 8 + 3]["frame"][:60]
    path = tmp_path / "made_elsewhere.lance"
    lance.write_dataset(pa.Table.from_pylist(rows), str(path))
    dataset = build_train_dataset(config_of("data=custom", f"data.train={path}"), [FrameStore.open(path)])
    draws = [(0, position, 0, position) for position in range(5)]
    chunk = dataset.__getitems__(draws)
    assert chunk.replaced[:, :2].tolist() == [[0, 2]]
    assert "made_elsewhere" in chunk.reasons[0]
    assert "step 3" in chunk.reasons[0]
    # The others are what the frames themselves give, up to what JPEG loses.
    memory = build_train_dataset(config_of("data=custom", "data.train=x"), [source])
    expected = memory.__getitems__(draws)
    for row in (0, 1, 3, 4):
        assert chunk.clips[row].tolist() == expected.clips[row].tolist()
        difference = chunk.views_global.patches[row].int() - expected.views_global.patches[row].int()
        assert difference.abs().float().mean() < 6
        assert torch.equal(chunk.views_local.positions[2 * row], expected.views_local.positions[2 * row])


@pytest.mark.timeout(120)
def test_a_video_file_that_vanishes_costs_its_clips_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    for name in "abc":
        make_video(tmp_path / "videos" / f"{name}.mp4", frames=16, rate=15)
    videos = open_source(str(tmp_path / "videos"), video_rate=15.0, video_episode_length=64)
    gone = Path(videos.files[1])
    gone.unlink()
    dataset = build_train_dataset(config_of("data=custom", "data.train=videos"), [videos])
    chunk = dataset.__getitems__([(0, position, 0, position % 3) for position in range(6)])
    assert chunk.replaced[:, :2].tolist() == [[0, 1], [0, 1]]
    assert all(str(gone) in reason for reason in chunk.reasons)
    assert set(chunk.clips[:, 1].tolist()) == {0, 2}


def eval_clips(source: MemorySource, **settings: Any) -> EvalClips:
    return EvalClips(source, num_frames=4, frame_stride=2, img_size=32, **settings)


def test_evaluation_clips_are_whole_fixed_and_centred() -> None:
    source = MemorySource([11, 20], labels=[7, 3], size=(40, 80))
    clips = eval_clips(source, clips_per_episode=2)
    assert len(clips) == 4
    batch = clips.__getitems__([0, 1, 2, 3])
    assert batch.video.shape == (4, 3, 4, 32, 32)
    assert batch.video.dtype == torch.uint8
    assert batch.episodes.tolist() == [0, 0, 1, 1]
    assert batch.clips.tolist() == [0, 1, 0, 1]
    assert batch.starts.tolist() == [0, 4, 0, 13]
    assert batch.labels.tolist() == [7, 7, 3, 3]
    assert batch.refused == []
    frames = torch.stack([source.frame(0, 4 + 2 * t) for t in range(4)]).float()
    # The middle of the picture, reduced by 32/40: away from its edges the centre square says the same.
    plain = torch.nn.functional.interpolate(frames[:, :, :, 20:60], (32, 32), mode="bicubic", antialias=True)
    difference = (batch.video[1].movedim(0, 1).float() - plain)[..., 4:-4].abs()
    assert difference.max() < 2
    one = [clips.__getitems__([i]).video for i in range(4)]
    assert torch.equal(torch.cat(one), batch.video)


def test_an_unreadable_evaluation_clip_is_named_and_left_out() -> None:
    clips = eval_clips(MemorySource([9, 9, 9], broken=[1]))
    batch = clips.__getitems__([0, 1, 2])
    assert batch.episodes.tolist() == [0, 2]
    assert batch.labels.tolist() == [-1, -1]
    assert [refusal.episode for refusal in batch.refused] == [1]
    assert "of memory_1.mp4 is not a JPEG" in batch.refused[0].reason
    assert clips.__getitems__([1]).video.shape == (0, 3, 4, 32, 32)
