"""Bare weights with the published names become a checkpoint, or are refused for what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marey import cli
from marey.config.compose import validate
from marey.core.errors import UserError
from marey.core.files import seal_holds
from marey.evaluation import embed as embed_room
from marey.evaluation.embed import embed
from marey.evaluation.export import export
from marey.evaluation.importing import import_weights
from marey.evaluation.inspect import inspect_text
from marey.evaluation.loading import load_encoder
from marey.objectives.registry import build
from marey.training.reading import read_checkpoint
from tests.evaluation.coloured_source import ColouredSource
from tests.models.test_vit import published_shapes

SMALL = ["model.img_size=32", "model.num_frames=4", "augmentation.local_size=16"]


def weights(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The published names at the smallest size: width 128, 4 blocks, patches of 1 x 16 x 16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"encoder.{name}": (0.1 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in published_shapes(128, 4, patch=16, tubelet=1).items()
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    return path


def bring(path: Path, *overrides: str, **options: Any) -> Any:
    out = path.with_name("imported.ckpt")
    return import_weights(path, out, overrides=[*SMALL, *overrides], overwrite=True, **options)


def test_an_imported_file_is_a_checkpoint_with_these_weights(file):
    done = bring(file)
    assert (done.tensors, done.parameters) == (53, sum(value.numel() for value in weights().values()))
    assert seal_holds(done.path)
    for name in ("ema", "online"):
        loaded = load_encoder(done.path, weights=name)
        assert loaded.model.name == "vit_nano"
        assert (loaded.model.rope_layout, loaded.model.attn_mode) == ("tiled", "block_causal")
        want = weights()
        assert all(torch.equal(value, want[f"encoder.{name}"]) for name, value in loaded.encoder.state_dict().items())
    given = loaded.preprocessing
    assert (given.num_frames, given.frame_stride, given.rate, given.img_size) == (4, 2, 15.0, 32)
    assert "model.rope_layout=tiled, model.attn_mode=block_causal (as the published weights were trained)" in str(done)
    assert "4 frames of 32 pixels, 7.5 per second" in str(done)


def test_a_new_run_can_start_from_it(file):
    done = bring(file, "seed=3")
    content, notes = read_checkpoint(done.path, exact=False)
    assert notes == []
    config = validate(content["marey"]["config"])
    module = build(config)
    module.load_state_dict(content["state_dict"], strict=True)
    fresh = build(config).state_dict()
    assert torch.equal(module.encoder.state_dict()["norm.bias"], weights()["encoder.norm.bias"])
    assert all(torch.equal(content["state_dict"][k], v) for k, v in fresh.items() if k.startswith("projector."))
    assert "projector.* drawn from seed 3, not trained" in content["marey"]["keys"]["state_dict"]


def test_it_embeds_and_says_what_it_is(file, tmp_path, monkeypatch):
    done = bring(file)
    monkeypatch.setattr(embed_room, "open_clips", lambda _path, _given: ColouredSource([0, 1, 2]))
    assert embed(done.path, "memory", tmp_path / "f.parquet", say=lambda _: None).rows == 3
    said = inspect_text(done.path, show_config=False)
    assert "imported (weights imported from model.safetensors)" in said
    assert "encoder.* imported from model.safetensors: evaluate and release these" in said
    assert "complete and undamaged" in said
    assert "walking" not in said.lower()
    assert "dropped in training" not in said  # weights do not show it


def test_the_card_of_imported_weights_claims_no_training_of_theirs(file, tmp_path):
    told: list[str] = []
    export(bring(file).path, tmp_path / "out", say=told.append)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "imported from `model.safetensors` and did not train" in card
    assert "It can be claimed that these are the weights of that file, unchanged" in card
    for claim in ("pretrained with Marey", "dropped in training", "| trained for |", "seed 0"):
        assert claim not in card
    assert not told  # there is neither a host nor a path to warn of
    assert "exports" in inspect_text(tmp_path)
    assert "runs " not in inspect_text(tmp_path)
    with pytest.raises(UserError, match=r"out is a folder; give the weights in it, .*model\.safetensors"):
        import_weights(tmp_path / "out", tmp_path / "x.ckpt")


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_dictionary_saved_by_pytorch_is_taken(nested, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"epoch": 3, "state_dict": weights()} if nested else weights(), path)
    done = bring(path)
    assert torch.equal(load_encoder(done.path).encoder.norm.weight, weights()["encoder.norm.weight"])


def test_half_precision_is_widened(tmp_path):
    save_file(weights(dtype=torch.bfloat16), tmp_path / "half.safetensors")
    got = load_encoder(bring(tmp_path / "half.safetensors").path).encoder.norm.weight
    assert torch.equal(got, weights(dtype=torch.bfloat16)["encoder.norm.weight"].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.norm.weight": None, "encoder.norm.weigth": torch.ones(128)},
         r"has no encoder\.norm\.weight, which vit_nano .* needs; its nearest name is encoder\.norm\.weigth"),
        ({"encoder.blocks.3.mlp.fc1.bias": None, "encoder.blocks.2.mlp.fc1.bias": None},
         r"has no encoder\.blocks\.2\.mlp\.fc1\.bias and 1 more"),
        ({"encoder.mask_token": torch.ones(1, 1, 128)},
         r"holds encoder\.mask_token, which vit_nano .* does not have \(its nearest name is encoder\.cls_token\)"),
        ({"encoder.norm.weight": torch.ones(127)}, r"encoder\.norm\.weight .* has shape \[127\] and .* needs \[128\]"),
        ({"encoder.norm.weight": torch.ones(128, dtype=torch.int64)}, r"holds torch\.int64 values"),
        ({"encoder.norm.weight": torch.full((128,), torch.inf)}, "not finite"),
        ({f"encoder.blocks.3.{name}": None for name in
          ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "mlp.fc1.weight", "mlp.fc1.bias",
           "mlp.fc2.weight", "mlp.fc2.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")},
         "width 128 and 3 blocks, which is none of .*vit_nano 128/4"),
        (dict.fromkeys(weights()) | {name.removeprefix("encoder."): value
                                               for name, value in weights().items()},
         r"has no encoder\.cls_token and 292 more, which vit_large .* needs; its nearest name is cls_token"),
    ],
)  # fmt: skip
def test_names_and_shapes_that_differ_are_named(change, message, tmp_path):
    found = {name: value for name, value in (weights() | change).items() if value is not None}
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        bring(tmp_path / "model.safetensors")
    assert not (tmp_path / "imported.ckpt").exists()


@pytest.mark.parametrize("override", ["model.name=vit_tiny", "model.patch_size=8", "model.tubelet_size=2"])
def test_a_size_that_is_not_the_weights_is_refused(override, file):
    with pytest.raises(UserError, match=f"{override} is not what .* holds: its shapes say (vit_nano|16|1); leave"):
        bring(file, override)


@pytest.mark.parametrize(
    ("override", "true"),
    [("model.rope_layout=rotary", "tiled"), ("model.attn_mode=full", "block_causal"), ("model.use_rope=false", "true")],
)
def test_positions_and_attention_that_are_not_the_weights_are_refused(override, true, file):
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"{override} is not what .* the published weights were trained {true}, and"):
        bring(file, override)
    assert getattr(bring(file, f"{key}={true}").model, key.removeprefix("model.")) is not None


@pytest.mark.parametrize("section", [None, "model", "encoder"])
def test_the_config_beside_the_weights_is_believed(section, file):
    said = {"rope_layout": "rotary", "attn_mode": "full", "hidden_size": 128}
    file.with_name("config.json").write_text(json.dumps(said if section is None else {section: said}))
    done = bring(file)
    assert (done.model.rope_layout, done.model.attn_mode) == ("rotary", "full")
    with pytest.raises(UserError, match=r"model\.rope_layout=tiled is not what .*config\.json says rotary"):
        bring(file, "model.rope_layout=tiled")
    file.with_name("config.json").write_text(json.dumps({"rope_layout": "spiral"}))
    with pytest.raises(UserError, match=r"rope_layout.*spiral|spiral.*rope_layout"):
        bring(file)
    file.with_name("config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json, beside the weights, cannot be read"):
        bring(file)


def test_the_input_that_the_config_beside_the_weights_names_is_taken(file):
    """A folder that transformers saved again has no words of Marey's in its weights, but their size in its config."""
    file.with_name("config.json").write_text(json.dumps({"image_size": 64, "num_frames": 6, "attn_mode": "full"}))
    small = [word for word in SMALL if not word.startswith(("model.img_size", "model.num_frames"))]
    done = import_weights(file, file.with_name("imported.ckpt"), overrides=small)
    assert (done.model.img_size, done.model.num_frames, done.model.attn_mode) == (64, 6, "full")
    assert (done.preprocessing["img_size"], done.preprocessing["num_frames"]) == (64, 6)
    asked = bring(file, "model.num_frames=8")  # what is asked for stands over it
    assert (asked.model.img_size, asked.model.num_frames) == (32, 8)


@pytest.mark.parametrize(("rate", "spoken"), [(24.0, "8 per second"), (None, "one in 3 of those stored")])
def test_an_export_comes_back_the_same_wherever_its_weights_are_moved(rate, spoken, write, content, tmp_path):
    config = json.loads(json.dumps(content["marey"]["config"]))
    config["model"]["rope_layout"] = "rotary"
    given = dict(content["marey"]["preprocessing"], rate=rate, frame_stride=3)
    first = write(marey=dict(content["marey"], config=config, preprocessing=given))
    export(first, tmp_path / "out", say=lambda _: None)
    moved = tmp_path / "moved.safetensors"
    (tmp_path / "out" / "model.safetensors").rename(moved)
    done = import_weights(moved, tmp_path / "back.ckpt")
    assert "(as the file itself says)" in str(done)
    assert str(done).endswith(f"4 frames of 16 pixels, {spoken}")
    before, after = load_encoder(first), load_encoder(done.path)
    assert after.model == before.model
    assert after.preprocessing == before.preprocessing
    video = torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(before.encoder(video), after.encoder(video))
    with pytest.raises(UserError, match=r"model\.rope_layout=tiled is not what .* the file itself says rotary"):
        import_weights(moved, tmp_path / "wrong.ckpt", overrides=["model.rope_layout=tiled"])


class Harmful:
    """Unpickling it would write a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return (Path.touch, (self.proof,))


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    torch.save({**weights(), "extra": Harmful(tmp_path / "proof")}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="would execute code from the file"):
        bring(tmp_path / "bad.pt")
    assert not (tmp_path / "proof").exists()


def test_files_of_another_kind_are_refused(checkpoint, file, tmp_path):
    with pytest.raises(UserError, match="is a Marey checkpoint already; use it as it is"):
        bring(checkpoint)
    torch.save({"model": weights(), "teacher": weights(seed=1)}, tmp_path / "two.pt")
    with pytest.raises(UserError, match=r"several sets of weights \(model, teacher\)"):
        bring(tmp_path / "two.pt")
    for value, message in (([1, 2], "holds one list"), ({"lr": 0.1}, "holds no tensors")):
        torch.save(value, tmp_path / "odd.pt")
        with pytest.raises(UserError, match=message):
            bring(tmp_path / "odd.pt")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        bring(tmp_path / "cut.safetensors")
    for name, message in (("missing.pt", "does not exist"), (".", "is a folder")):
        with pytest.raises(UserError, match=message):
            bring(tmp_path / name)


def test_the_place_must_be_free_and_the_request_well_formed(file, tmp_path, capsys):
    out = tmp_path / "a.ckpt"
    cli.main(["import", str(file), str(out), *SMALL, "--rate", "30"])
    assert "4 frames of 32 pixels, 15 per second" in capsys.readouterr().out
    for options, message in (
        ({}, "exists already; give --overwrite"),
        ({"overwrite": True, "rate": 0.0}, "must be above 0"),
        ({"overwrite": True, "overrides": ["model.rope_lay=tiled"]}, "model.rope_layout"),
    ):
        with pytest.raises(UserError, match=message):
            import_weights(file, out, **options)
    with pytest.raises(UserError, match=r"must end in \.ckpt"):
        import_weights(file, tmp_path / "a.pt")
    assert load_file(file).keys() == weights().keys()


def test_what_holds_no_weights_is_refused_with_what_an_import_takes(tmp_path: Path) -> None:
    for content in (b"", b"hello"):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(UserError, match=r"x\.pt is .*; give a \.safetensors or \.pt file of weights"):
            import_weights(tmp_path / "x.pt", tmp_path / "out.ckpt", overrides=[])
