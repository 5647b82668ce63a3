from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.core.errors import UserError
from marey.core.latents import LatentSample
from marey.latents.adapter import LatentAdapter
from marey.latents.dataset import LatentDataset
from marey.sampling.latent_stream import read_sources, train_stream, validation_stream
from marey.sampling.stream import MicrobatchSampler


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
