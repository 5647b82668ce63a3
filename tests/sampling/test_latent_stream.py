from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, load_run, validate
from marey.core.errors import UserError
from marey.core.latents import LatentSample
from marey.latents.adapter import LatentAdapter
from marey.latents.dataset import LatentDataset
from marey.sampling.budget import check_shapes
from marey.sampling.latent_stream import read_sources, train_stream, validated_counts, validation_stream
from marey.sampling.planner import MicrobatchPlanner
from marey.sampling.stream import MicrobatchSampler, RequestStream


def write(
    folder: Path, name: str, clips: int, *, canvas: tuple[int, int], frames: int = 9, columns: bool = True
) -> str:
    rng = np.random.default_rng(len(name))
    rows = []
    for i in range(clips):
        np.save(folder / f"{name}{i}.npy", rng.standard_normal((3, frames, *canvas)).astype(np.float32))
        size = f",{canvas[0]},{canvas[1]}" if columns else ""
        rows.append(f"{name}{i},{name}{i}.npy,{frames}{size}\n")
    path = folder / f"{name}.csv"
    path.write_text("clip_id,path,length_frames" + (",height,width" if columns else "") + "\n" + "".join(rows))
    return str(path)


def load(*overrides: str) -> CausalConfig:
    return validate(compose_container(overrides, config_name="causal_video"), CausalConfig)


def mixture(folder: Path, *overrides: str) -> CausalConfig:
    a, b = write(folder, "a", 30, canvas=(4, 4)), write(folder, "b", 20, canvas=(4, 6))
    return load(f"data.sources=[{{name: a, manifest: {a}, weight: 2}}, {{name: b, manifest: {b}}}]", *overrides)


def test_a_mixture_is_read_split_drawn_and_loaded(tmp_path: Path) -> None:
    config = mixture(tmp_path, "data.val_fraction=0.2", "data.train_batch_size=3")
    sources = read_sources(config.data)
    stream, shares = train_stream(config, sources.train, world=1)
    assert [float(s) for s in shares] == pytest.approx([2 / 3, 1 / 3])
    validation = validation_stream(config, sources.val, world=1)
    held_out = {s.clip.clip_id for batch in MicrobatchSampler(validation, epoch=0, rank=0) for s in batch}
    trained = {s.clip.clip_id for batch in MicrobatchSampler(stream, epoch=0, rank=0) for s in batch}
    assert held_out
    assert trained
    assert not held_out & trained

    loader = DataLoader(
        LatentDataset(LatentAdapter()),
        batch_sampler=MicrobatchSampler(stream, epoch=0, rank=0),
        collate_fn=list,
    )
    for batch in loader:
        samples: list[LatentSample] = [sample for sample, _ in batch]
        assert len({sample.video_latents.shape[2:] for sample in samples}) == 1
        for sample in samples:
            stored = torch.from_numpy(np.load(tmp_path / f"{sample.identity.clip_id}.npy"))
            start = sample.identity.start
            assert torch.equal(sample.video_latents, stored[:, start : start + sample.valid_frames])


def test_validation_does_not_change_with_the_mode(tmp_path: Path) -> None:
    found = []
    for mode in ("strict", "padded", "bucket", "packed"):
        config = mixture(tmp_path, f"data.batching.mode={mode}", "data.val_fraction=0.2")
        stream = validation_stream(config, read_sources(config.data).val, world=2)
        found.append([stream.requests(0, m, rank) for m in range(stream.planner.micro_steps(0)) for rank in range(2)])
    assert found[0] == found[1] == found[2] == found[3]
    assert all(len(batch) <= 1 for batch in found[0])


def test_a_condition_frame_is_left_free_before_every_window(tmp_path: Path) -> None:
    config = mixture(
        tmp_path,
        "program.name=chunked_conditioned",
        "data.batching.mode=strict",
        "data.train_batch_size=1",
        "data.val_fraction=0.2",
    )
    stream, _ = train_stream(config, read_sources(config.data).train, world=1)
    adapter = LatentAdapter(condition=True)
    for batch in MicrobatchSampler(stream, epoch=0, rank=0):
        for request in batch:
            assert request.start >= 1
            assert adapter.load(request).condition_latent is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.buckets=[[5,15]]"], r"a.csv: source a has no usable window: .* at most 9 latent frames .* needs 20"),
        (["model.patch=3", "model.hidden=48"], "clip a0 has height 4, which does not divide by model.patch=3"),
        (["data.val_fraction=0.00001"], "leaves the validation side empty"),
        (["data.weights=by_hours"], "needs the column fps, which source a does not have"),
        (["data.epoch_draws=1"], "does not fill one optimizer step"),
    ],
)
def test_what_the_data_cannot_give_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    config = mixture(tmp_path, *(["data.val_fraction=0.2"] if "val_fraction" not in overrides[0] else []), *overrides)
    with pytest.raises(UserError, match=message):
        train_stream(config, read_sources(config.data).train, world=1)


def test_a_validation_side_without_a_window_is_refused(tmp_path: Path) -> None:
    good, short = write(tmp_path, "g", 9, canvas=(4, 4)), write(tmp_path, "s", 3, canvas=(4, 4), frames=3)
    config = load(f"data.train={good}", f"data.val={short}")
    sources = read_sources(config.data)
    with pytest.raises(UserError, match="validation side has no usable window in its 3 clips"):
        validation_stream(config, sources.val, world=1)


def test_grouping_by_shape_names_the_source_without_height_and_width(tmp_path: Path) -> None:
    bare = write(tmp_path, "bare", 9, canvas=(4, 4), columns=False)
    config = load(f"data.train={bare}", "data.val_fraction=0.3")
    with pytest.raises(UserError, match="source bare has no columns height and width"):
        train_stream(config, read_sources(config.data).train, world=1)
    config = load(f"data.train={bare}", "data.val_fraction=0.3", "data.shape_bucketed_batching=false")
    stream, _ = train_stream(config, read_sources(config.data).train, world=1)
    assert stream.planner.micro_steps(0) >= 1


def test_a_source_of_weight_zero_never_blocks(tmp_path: Path) -> None:
    """Neither without a window nor without what the others are weighed by."""
    good = Path(write(tmp_path, "g", 9, canvas=(4, 4)))
    head, *rows = good.read_text().splitlines()
    good.write_text("\n".join([f"{head},fps", *(f"{row},2" for row in rows)]) + "\n")
    short = write(tmp_path, "s", 3, canvas=(4, 4), frames=3)
    config = load(
        f"data.sources=[{{name: g, manifest: {good}}}, {{name: s, manifest: {short}, weight: 0}}]",
        "data.weights=by_hours",
        "data.val_fraction=0.3",
    )
    stream, shares = train_stream(config, read_sources(config.data).train, world=1)
    assert shares == [1, 0]
    assert {request.source for m in range(2) for request in stream.requests(0, m, 0)} == {"g"}


@pytest.mark.parametrize(
    ("program", "column", "room"),
    [
        ("prefix_suffix", "start", "at most 3 latent frames and"),
        ("chunked_conditioned", None, "at most 8 latent frames"),
    ],
)
def test_a_source_without_a_window_says_how_much_room_its_clips_leave(
    tmp_path: Path, program: str, column: str | None, room: str
) -> None:
    path = Path(write(tmp_path, "a", 9, canvas=(4, 4)))
    if column:
        head, *rows = path.read_text().splitlines()
        path.write_text("\n".join([f"{head},{column}", *(f"{row},6" for row in rows)]) + "\n")
    config = load(
        f"data.train={path}",
        "data.val_fraction=0.3",
        f"program.name={program}",
        "data.batching.mode=strict",
        "data.buckets=[[2,7]]",
    )
    with pytest.raises(UserError, match=room) as refused:
        train_stream(config, read_sources(config.data).train, world=1)
    assert ("after the condition frame" in str(refused.value)) == (program == "chunked_conditioned")
    assert "the shortest bucket needs 9" in str(refused.value)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("data.window_stride=3", lambda p: [s.stride for s in p.windows.sources], [3, 3]),
        ("data.buckets=[[2,2],[1,3]]", lambda p: p.windows.sources[0].geometry.buckets, ((1, 3), (2, 2))),
        ("data.epoch_draws=17", lambda p: p.draws.epoch_draws, 17),
        ("data.train_batch_size=3", lambda p: p.batch, 3),
        ("accumulate_grad_batches=2", lambda p: p.accumulate, 2),
        ("data.batching.drop_last_train=false", lambda p: p.tail, "repeat"),
        ("data.batching.bucket_pool_size=7", lambda p: p.pooled, 3),
        ("data.batching.mode=packed", lambda p: p.pooled, 1),
        ("data.shape_bucketed_batching=false", lambda p: p.shape_grouping, False),
    ],
)
def test_what_the_configuration_says_of_sampling_reaches_the_plan(
    tmp_path: Path, override: str, read: Any, value: object
) -> None:
    def planned(*overrides: str) -> MicrobatchPlanner:
        config = mixture(tmp_path, "data.val_fraction=0.2", *overrides)
        return train_stream(config, read_sources(config.data).train, world=2)[0].planner

    assert read(planned(override)) == value
    assert read(planned()) != value


@pytest.mark.parametrize("override", ["seed=1", "data.batching.bucket_order=sorted", "data.on_bad_clip=replace"])
def test_seed_order_and_replacements_reach_the_requests(tmp_path: Path, override: str) -> None:
    def asked(*overrides: str) -> list[Any]:
        config = mixture(tmp_path, "data.val_fraction=0.2", *overrides)
        stream, _ = train_stream(config, read_sources(config.data).train, world=1)
        return list(MicrobatchSampler(stream, epoch=0, rank=0))

    assert asked(override) != asked()
    assert any(request.alternates for batch in asked("data.on_bad_clip=replace") for request in batch)


def test_the_held_out_side_is_the_share_that_was_asked_for(tmp_path: Path) -> None:
    sources = read_sources(mixture(tmp_path, "data.val_fraction=0.2").data)
    train, val = (sum(len(source.manifest) for source in side) for side in sources)
    assert train + val == 50
    assert 3 <= val <= 17


@pytest.mark.parametrize("column", [True, False])
def test_a_clip_without_text_is_refused_when_the_manifest_is_read(tmp_path: Path, column: bool) -> None:
    path = Path(write(tmp_path, "t", 9, canvas=(4, 4)))
    if column:
        head, *rows = path.read_text().splitlines()
        texts = [",push" if i != 4 else ", " for i in range(9)]
        path.write_text("\n".join([f"{head},text", *map(str.__add__, rows, texts)]) + "\n")
    row, clip = (5, "t4") if column else (1, "t0")
    options = (f"data.train={path}", "data.val_fraction=0.3")
    read_sources(load(*options).data)
    with pytest.raises(UserError, match=rf"t.csv, row {row}, column text: clip {clip} has no text"):
        read_sources(load(*options, "data.text_conditioning=task_prompt").data)


def counted(stream: RequestStream, world: int) -> set[tuple[str, str, int]]:
    return {
        (request.source, request.clip.clip_id, request.start)
        for micro_step in range(stream.planner.micro_steps(0))
        for rank in range(world)
        for request in stream.requests(0, micro_step, rank)
    }


def test_a_limited_validation_is_of_all_sources_and_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    limits = ("data.val_fraction=0.4", "trainer.limit_val_batches=6")
    found = []
    for world, mode in ((1, "packed"), (3, "padded")):
        config = mixture(tmp_path, *limits, f"data.batching.mode={mode}")
        stream = validation_stream(config, read_sources(config.data).val, world=world)
        assert stream.planner.micro_steps(0) == 6 // world
        found.append(counted(stream, world))
    assert found[0] == found[1]
    counts = validated_counts(stream)
    assert [sum(source == name for source, _, _ in found[0]) for name in "ab"] == counts
    assert min(counts) >= 2
    assert sum(counts) == 6


def test_half_of_the_validation_is_half_of_its_windows(tmp_path: Path) -> None:
    config = mixture(tmp_path, "data.val_fraction=0.4", "trainer.limit_val_batches=0.5")
    sources = read_sources(config.data)
    stream = validation_stream(config, sources.val, world=1)
    assert sum(validated_counts(stream)) == sum(stream.planner.windows.sizes) // 2
    config = mixture(tmp_path, "data.val_fraction=0.4", "trainer.limit_val_batches=0.001")
    with pytest.raises(UserError, match=r"leaves none of the .* windows of validation"):
        validation_stream(config, sources.val, world=1)


def test_without_validation_a_single_clip_is_trained_on(tmp_path: Path) -> None:
    one, many = write(tmp_path, "one", 1, canvas=(4, 4)), write(tmp_path, "many", 20, canvas=(4, 4))
    with pytest.raises(UserError, match="side empty"):
        read_sources(load(f"data.train={one}").data)
    sources = read_sources(load(f"data.train={one}").data, validates=False)
    assert ([len(source.manifest) for source in sources.train], sources.val) == ([1], [])
    # Where there is a split, turning validation off changes no clip.
    with_it, without = (
        read_sources(load(f"data.train={many}", "data.val_fraction=0.3").data, validates=validates)
        for validates in (True, False)
    )
    assert with_it.train[0].manifest.texts("clip_id") == without.train[0].manifest.texts("clip_id")


def test_every_window_of_a_varied_source_has_stand_ins(tmp_path: Path) -> None:
    """Four canvases and five lengths: a clip that fits exactly is one in twenty, one that is long enough is not."""
    canvases = [(8, 8), (8, 12), (12, 8), (10, 14)]
    rows = [f"c{i},c{i}.npy,64,{h},{w}" for i in range(400) for h, w in [canvases[i % 4]]]
    path = tmp_path / "long.csv"
    path.write_text("clip_id,path,length_frames,height,width\n" + "\n".join(rows) + "\n")
    words = [f"data.train={path}", "causal_recipe=long", "data.check_files=false"]
    config = load_run([*words, "data.on_bad_clip=replace"], config_name="causal_video", config_dir=None)
    assert isinstance(config, CausalConfig)
    stream, _ = train_stream(config, read_sources(config.data).train, world=1)
    steps = range(0, stream.planner.micro_steps(0), 7)
    requests = [request for micro_step in steps for request in stream.requests(0, micro_step, 0)]
    assert len({request.frames for request in requests}) > 1
    for request in requests:
        assert len(request.alternates) == 3
        assert len({other.clip.clip_id for other in request.alternates} | {request.clip.clip_id}) == 4
        for other in request.alternates:
            assert (other.clip.height, other.clip.width) == (request.clip.height, request.clip.width)
            assert (other.prefix, other.future) == (request.prefix, request.future)
            assert other.start + other.frames <= other.clip.length_frames
    assert [r.alternates for r in stream.requests(0, 3, 0)] == [r.alternates for r in stream.requests(0, 3, 0)]


def test_held_out_windows_that_cannot_share_a_batch_are_refused(tmp_path: Path) -> None:
    config = mixture(tmp_path, "data.val_fraction=0.4", "data.val_batch_size=4", "trainer.limit_val_batches=1.0")
    stream = validation_stream(config, read_sources(config.data).val, world=1)
    with pytest.raises(UserError, match=r"different canvases \(4 x 4 and 4 x 6\).*set data.val_batch_size=1"):
        check_shapes(stream.planner, strict=False, key="data.val_batch_size")
    rows = [f"c{i},c{i}.npy,{4 + i % 6},4,4" for i in range(40)]
    path = tmp_path / "lengths.csv"
    path.write_text("clip_id,path,length_frames,height,width\n" + "\n".join(rows) + "\n")
    words = ["data.check_files=false", "data.val_fraction=0.5", "data.val_batch_size=4"]
    config = load(f"data.train={path}", *words, "data.buckets=[[1,3],[1,4],[1,6]]")
    stream = validation_stream(config, read_sources(config.data).val, world=1)
    check_shapes(stream.planner, strict=False, key="data.val_batch_size")
    with pytest.raises(UserError, match=r"different lengths .*mode=strict cannot hold; set data.val_batch_size=1"):
        check_shapes(stream.planner, strict=True, key="data.val_batch_size")
