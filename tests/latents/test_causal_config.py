from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.core.errors import UserError
from marey.latents.make_config import make_config


def load(*overrides: str, config_name: str = "causal_video", config_dir: Path | None = None) -> CausalConfig:
    plain = compose_container(overrides, config_name=config_name, config_dir=config_dir)
    return validate(plain, CausalConfig)


def test_the_defaults_fit_one_device_of_any_kind() -> None:
    config = load("data.train=clips.csv")
    assert (config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy) == (1, 1, "auto")
    assert config.trainer.precision == "32-true"
    assert config.ema.enabled is False
    assert config.noise == "collated"
    assert config.loss.normalize_over == "microbatch"
    assert [tuple(b) for b in config.data.buckets] == [(1, 3), (2, 6), (3, 9), (4, 12), (5, 15)]


@pytest.mark.parametrize("mode", ["strict", "padded", "bucket", "packed"])
def test_the_demo_is_accepted_in_every_mode(mode: str) -> None:
    config = load("data=demo", f"data.batching.mode={mode}")
    assert (config.data.train, config.data.val) == ("demo:train", "demo:heldout")


def test_the_long_recipe_has_thirty_geometries_of_at_most_sixty_four_frames() -> None:
    buckets = load("data=demo", "causal_recipe=long").data.buckets
    assert len(set(buckets)) == 30
    assert max(map(sum, buckets)) == 64


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "give either data.train .* or data.sources; neither is"),
        (["data.train=a", "data.sources=[{name: a, manifest: b}]"], "both are given"),
        (
            ["data.batching.mode=sorted"],
            "mode=sorted is not a mode; mode=bucket with data.batching.bucket_order=sorted",
        ),
        (["data.batching.mode=packd"], "did you mean packed"),
        (["data.batching.mod=packed"], "data.batching.mod is not a key .*did you mean data.batching.mode"),
        (["data.batching.mode=packed", "model.patch_t=2"], "mode=packed needs model.patch_t=1, not 2"),
        (["program.name=chunked_conditioned"], "program.name=chunked_conditioned works on data.batching.mode=strict"),
        (["data.batching.max_tokens=9"], "max_tokens=9 needs data.batching.mode=packed, not bucket"),
        (["data.batching.max_tokens=0", "data.batching.mode=packed"], "data.batching.max_tokens=0 is not allowed"),
        (["program.text_dropout=.1"], "text_dropout=0.1 has no text to drop"),
        (["data.text.encoder=t5"], "data.text.encoder=t5 needs data.text.index"),
        (["data.text.index=x"], "data.text.index=x needs data.text.encoder to name"),
        (["model.heads=3"], "does not give an even number of channels"),
        (["data.buckets=[[1,0]]"], r"data.buckets\[0\]\[1\]=0 is not allowed"),
        (["data.buckets=[[1,2],[1,2]]"], r"data.buckets holds \[1, 2\] twice"),
        (["data.buckets=[[1,3]]", "model.patch_t=2"], "do not divide by model.patch_t=2"),
        (
            ["data.buckets=[[2,2]]", "model.patch_t=2", "data.batching.pad_to_multiple_of=3"],
            "pad_to_multiple_of=3 frames do not divide by model.patch_t=2",
        ),
        (
            ["program.name=chunked_conditioned", "data.batching.mode=strict", "model.patch_t=2"],
            "program.name=chunked_conditioned needs model.patch_t=1, not 2",
        ),
        (["data.val=[{name: a, manifest: x}, {name: a, manifest: y}]"], "data.val names a twice"),
        (["data.text_conditioning=caption"], "data.text_conditioning=caption is not allowed"),
        (["data.batching.bucket_pool_size=0"], "data.batching.bucket_pool_size=0 is not allowed"),
        (["data.epoch_draws=0"], "data.epoch_draws=0 is not allowed"),
        (["data.window_stride=0"], "data.window_stride=0 is not allowed"),
        (["program.text_dropout=1.0"], "program.text_dropout=1.0 is not allowed"),
        (["loss.normalize_over=video"], "loss.normalize_over=video is not allowed"),
        (["noise=per_clip"], "noise=per_clip is not allowed"),
        (["program.chunk_size=[3,2]"], r"program.chunk_size=\[3, 2\] must ascend"),
        (["data.val_fraction=1.0"], "data.val_fraction=1.0 is not allowed"),
        (["data.weights=by_mood"], "data.weights=by_mood is not allowed"),
    ],
)
def test_what_cannot_be_meant_is_refused_while_the_configuration_is_read(overrides: list[str], message: str) -> None:
    base = [] if not overrides or "data.sources" in overrides[-1] else ["data=demo"]
    with pytest.raises(UserError, match=message):
        load(*base, *overrides)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[{name: a, manifest: x}, {name: a, manifest: y}]", "data.sources names a twice"),
        ("[{name: a, manifest: x, weight: 0}]", "every weight is 0"),
        ("[{name: a, manifest: x, weight: -1}]", r"data.sources\[0\].weight=-1 is not allowed"),
        ("[{name: a, manifest: x, weight: inf}]", r"data.sources\[0\].weight=inf is not allowed"),
        ("[{name: a, manifest: x, weight: nan}]", r"data.sources\[0\].weight=nan is not allowed"),
        ("[{name: a, manifest: x, wieght: 1}]", r"data.sources\[0\].wieght is not a key .*data.sources\[0\].weight"),
        ("[]", "data.sources"),
    ],
)
def test_sources_are_checked(sources: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(f"data.sources={sources}")


def manifest(
    folder: Path, name: str, canvas: tuple[int, int], *, columns: str = "height,width,fps", c: int = 6
) -> Path:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{name}.npy", np.zeros((c, 8, *canvas), dtype=np.float32))
    values = {"height": canvas[0], "width": canvas[1], "fps": 4}
    path = folder / f"{name}.csv"
    row = ",".join(str(values[column]) for column in columns.split(","))
    rows = "".join(f'{name[0]}{i},"{name}.npy",8,{row}\n' for i in range(6))
    path.write_text(f"clip_id,path,length_frames,{columns}\n{rows}")
    return path


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return compose_container(["data.train=x"], config_name="causal_video")


def test_make_config_writes_a_complete_run_that_reads_back_as_itself(tmp_path: Path, defaults: dict[str, Any]) -> None:
    manifests = [manifest(tmp_path / "d", "wide", (8, 12)), manifest(tmp_path / "d", "tall, or so", (12, 8))]
    plain = make_config(manifests, tmp_path / "run.yaml", defaults=defaults)
    config = load(config_name="run", config_dir=tmp_path)
    assert config == CausalConfig.model_validate(plain)
    data = config.data
    assert (data.train_batch_size, data.val_batch_size, data.shape_bucketed_batching) == (36, 1, True)
    assert (data.batching.mode, data.batching.bucket_pool_size, data.batching.drop_last_train) == ("bucket", 1152, True)
    assert data.weights == "by_hours"
    assert data.sources is not None
    assert [source.name for source in data.sources] == ["wide", "tall, or so"]
    assert [Path(source.manifest) for source in data.sources] == [path.resolve() for path in manifests]
    assert (config.model.channels, config.model.patch) == (6, 2)
    assert defaults["data"]["train"] == "x"
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["name"] == "run"


def test_make_config_names_sources_apart_and_fits_the_patch(tmp_path: Path, defaults: dict[str, Any]) -> None:
    manifests = [manifest(tmp_path / "a", "m", (7, 8)), manifest(tmp_path / "b", "m", (8, 8))]
    plain = make_config(manifests, tmp_path / "run.yaml", defaults=defaults, weights="size")
    assert [source["name"] for source in plain["data"]["sources"]] == ["a-m", "b-m"]
    assert plain["model"]["patch"] == 1
    assert plain["data"]["weights"] == "by_size"


def test_make_config_refuses_what_its_recipe_needs_and_a_manifest_lacks(
    tmp_path: Path, defaults: dict[str, Any]
) -> None:
    out = tmp_path / "run.yaml"
    flat, slow = (
        manifest(tmp_path, "flat", (8, 8), columns="fps"),
        manifest(tmp_path, "slow", (8, 8), columns="height,width"),
    )
    good, other = manifest(tmp_path, "good", (8, 8)), manifest(tmp_path, "other", (8, 8), c=7)
    for manifests, message in (
        ([flat], "no columns height and width"),
        ([slow], "no column fps"),
        ([good, other], "of 6 channels and .* of 7"),
        ([good, good], "given twice"),
        ([], "at least one"),
    ):
        with pytest.raises(UserError, match=message):
            make_config(manifests, out, defaults=defaults)
    assert make_config([slow], out, defaults=defaults, weights="balanced")["data"]["weights"] == "by_draw"
    with pytest.raises(UserError, match="--weights minutes is not one of balanced, hours, size"):
        make_config([good], out, defaults=defaults, weights="minutes")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"ends in .yaml"):
        make_config([good], tmp_path / "run.json", defaults=defaults)
