"""What `marey export` writes runs without Marey and gives the same values."""

from __future__ import annotations

import ast
import json
import re
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from marey import cli
from marey.core.errors import UserError
from marey.evaluation import export as room
from marey.evaluation.export import FILES, example_frames, export
from marey.evaluation.inspect import inspect_text
from marey.evaluation.loading import LoadedEncoder, load_encoder
from marey.evaluation.release.encoder_marey import VideoEncoder, preprocess
from marey.models.vit import EPS, VisionTransformer
from marey.pixels.evalclips import short_side_centre_crop
from tests.models.samples import encoder as random_encoder


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    """`transformers`, keeping the code that it copies in a folder of this test run."""
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        transformers.utils.logging.disable_progress_bar()
        yield transformers


@pytest.fixture
def exported(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out", say=lambda _: None)
    return tmp_path / "out"


def clips(loaded: LoadedEncoder, batch: int, seed: int = 0) -> torch.Tensor:
    given = loaded.preprocessing
    shape = (batch, 3, given.num_frames, given.img_size, given.img_size)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def same_in_plain_torch(model: VisionTransformer) -> VideoEncoder:
    plain = VideoEncoder(
        width=model.embed_dim,
        depth=model.depth,
        num_heads=model.num_heads,
        mlp_width=4 * model.embed_dim,
        patch_size=model.patch_size,
        tubelet_size=model.tubelet_size,
        use_rope=model.use_rope,
        rope_layout=model.rope_layout,
        attn_mode=model.attn_mode,
        eps=EPS,
    )
    plain.load_state_dict(model.state_dict(), strict=True)
    return plain.to(model.cls_token.dtype)


@pytest.mark.parametrize("attn_mode", ["block_causal", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_layout": "tiled"},
        {"rope_layout": "rotary"},
        {"use_rope": False},
        {"tubelet_size": 2},
        {"name": "vit_tiny"},
        {"name": "vit_tiny", "use_rope": False},
    ],
)
def test_the_exported_code_gives_every_token_bit_for_bit(changes, attn_mode):
    model = random_encoder(**changes, attn_mode=attn_mode).eval()
    for dtype, shape in ((torch.float32, (2, 3, 4, 32, 32)), (torch.float64, (1, 3, 2, 16, 40))):
        video = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        ours = model.to(dtype)
        with torch.inference_mode():
            assert torch.equal(same_in_plain_torch(ours)(video), ours(video))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exported_code_runs_in_half_precision(dtype):
    model = random_encoder().to(dtype).eval()
    video = torch.randn(1, 3, 4, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        assert torch.equal(same_in_plain_torch(model)(video), model(video))


@pytest.mark.parametrize("size", [(40, 60), (61, 37), (37, 50), (16, 16), (16, 25), (9, 12), (300, 17)])
def test_the_exported_preprocessing_is_that_of_evaluation(checkpoint, size):
    given = load_encoder(checkpoint).preprocessing
    frames = torch.randint(0, 256, (4, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    want = given.normalize(short_side_centre_crop(frames, given.img_size).movedim(1, 0).unsqueeze(0))
    got = preprocess(frames, size=given.img_size, mean=given.mean, std=given.std)
    assert torch.equal(got, want)
    both = preprocess(frames.expand(2, -1, -1, -1, -1), size=given.img_size, mean=given.mean, std=given.std)
    assert torch.equal(both, want.expand(2, -1, -1, -1, -1))


def test_frames_in_another_order_are_named():
    with pytest.raises(ValueError, match=r"these are \[4, 16, 16, 3\]"):
        preprocess(torch.zeros(4, 16, 16, 3, dtype=torch.uint8), size=16, mean=[0, 0, 0], std=[1, 1, 1])
    with pytest.raises(ValueError, match="uint8"):
        preprocess(torch.zeros(4, 3, 16, 16), size=16, mean=[0, 0, 0], std=[1, 1, 1])


def test_transformers_loads_the_folder_and_gives_the_same_bits(auto, checkpoint, exported, tmp_path):
    loaded = load_encoder(checkpoint)
    model = auto.AutoModel.from_pretrained(exported, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    assert not model.training
    video = loaded.preprocessing.normalize(clips(loaded, 3))
    with torch.inference_mode():
        want = loaded.encoder(video)
        got = model(video)
        assert torch.equal(got.last_hidden_state, want)
        assert torch.equal(got.pooler_output, want[:, 0])
        assert torch.equal(model(video, return_dict=False)[1], want[:, 0])
    frames = clips(loaded, 2).movedim(1, 2)
    processor = auto.AutoImageProcessor.from_pretrained(exported, trust_remote_code=True)
    assert torch.equal(processor(frames)["pixel_values_videos"], model.preprocess(frames))
    assert torch.equal(model.preprocess(frames), loaded.preprocessing.normalize(clips(loaded, 2)))
    # Whoever changes the model and saves it keeps something that loads.
    model.save_pretrained(tmp_path / "again")
    again = auto.AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True)
    with torch.inference_mode():
        assert torch.equal(again(video).last_hidden_state, want)


def test_the_lines_of_the_card_reproduce_the_embedding(auto, checkpoint, exported, monkeypatch, capsys):
    card = (exported / "README.md").read_text()
    assert "a difference of 0.0: bit for bit the same" in card
    (lines,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(lines.strip().splitlines()) == 3
    monkeypatch.chdir(exported)
    names: dict[str, object] = {}
    exec(lines, names)
    assert capsys.readouterr().out.strip() == "0.0"
    loaded, example = load_encoder(checkpoint), load_file(exported / "example.safetensors")
    assert torch.equal(example["video"], example_frames(loaded))
    given = loaded.preprocessing
    video = given.normalize(short_side_centre_crop(example["video"], given.img_size).movedim(1, 0).unsqueeze(0))
    with torch.inference_mode():
        assert torch.equal(example["embedding"], loaded.encoder(video)[:, 0])


def test_the_code_of_an_export_imports_neither_marey_nor_anything_else_of_its_needs(exported):
    found = set()
    for name in ("encoder_marey.py", "modeling_marey.py"):
        text = (exported / name).read_text()
        assert "SPDX-License-Identifier: Apache-2.0" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add("." * node.level + (node.module or ""))
    assert {name.split(".")[0] or name for name in found} == {
        "__future__", "collections", "torch", "transformers", ".encoder_marey",
    }  # fmt: skip


def test_the_folder_says_what_it_is(checkpoint, content, exported, write, tmp_path):
    assert {path.name for path in exported.iterdir()} == FILES
    config = json.loads((exported / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_marey.MareyModel"
    assert (config["rope_layout"], config["attn_mode"], config["hidden_size"]) == ("tiled", "block_causal", 128)
    given = json.loads((exported / "preprocessor_config.json").read_text())
    assert (given["size"], given["frame_stride"], given["rate"]) == ({"shortest_edge": 16}, 1, 15.0)
    assert json.loads((exported / "receipt.json").read_text()) == content["marey"]["receipt"]
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert set(content["state_dict_ema"]) == set(file.keys())
        assert json.loads(file.metadata()["marey_model"])["rope_layout"] == "tiled"
    receipt = {
        "run_id": "r-1",
        "differences_from_recipe": [
            "model.name=vit_nano (recipe: vit_tiny)",
            "data.train=/secret (recipe: demo:train)",
        ],
        "differences_from_published_code": [{"what": "rule", "published": "old", "here": "new", "restore": ""}],
        "consumed": {"clips": 1234, "tokens": 99},
        "data": {"name": "mine", "train": [{"name": "a", "path": "/secret/a", "episodes": 7, "frames": 896}]},
    }
    export(write(marey=dict(content["marey"], receipt=receipt)), tmp_path / "other", say=lambda _: None)
    card = (tmp_path / "other" / "README.md").read_text()
    for words in (
        "that the plumbing works; nothing about learning",
        "40 optimizer steps, epoch 2: 1,234 clips, 99 tokens consumed",
        "effective 16 (recipe: 8)",
        "mine (a: 7 episodes, 896 frames)",
        "`model.name=vit_nano (recipe: vit_tiny)`",
        "rule: new (published: old)",
        "evaluate and release these",
    ):
        assert words in card
    assert "/secret" not in card
    assert "license of the weights is not stated" in card


def test_the_weights_asked_for_are_exported(checkpoint, content, tmp_path):
    for weights, key in (("online", "state_dict"), ("ema", "state_dict_ema")):
        done = export(checkpoint, tmp_path / weights, weights=weights, say=lambda _: None)
        assert done.weights == weights
        found = load_file(tmp_path / weights / "model.safetensors")
        assert all(torch.equal(found[name], content[key][name]) for name in found)


def test_an_export_is_whole_or_absent_and_an_earlier_one_survives(checkpoint, exported, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}

    def fail(*_a: object, **_k: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(room, "model_card", fail)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
            export(checkpoint, tmp_path / "new", say=lambda _: None)
        with pytest.raises(UserError, match="No space left"):
            export(checkpoint, exported, overwrite=True, weights="online", say=lambda _: None)
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "out"]
    export(checkpoint, exported, overwrite=True, weights="online", say=lambda _: None)
    assert (exported / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "out"]


def test_only_a_free_place_or_an_earlier_export_is_written_to(checkpoint, exported, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert export(checkpoint, tmp_path / "empty", say=lambda _: None).path == tmp_path / "empty"
    with pytest.raises(UserError, match="holds an export already; give --overwrite"):
        export(checkpoint, exported)
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        export(checkpoint, exported, overwrite=True)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="holds other files"):
        export(checkpoint, tmp_path / "theirs", overwrite=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is the folder that this command runs in"):
        export(checkpoint, ".")
    assert export(checkpoint, "../here/new", say=lambda _: None).bytes > 0
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for place in ("link", "last.ckpt"):
        with pytest.raises(UserError, match="is not a folder of its own"):
            export(checkpoint, tmp_path / place, overwrite=True)


def test_what_cannot_be_exported_is_refused(write, content, tmp_path):
    causal = write(marey=dict(content["marey"], kind="causal"))
    with pytest.raises(UserError, match="of kind causal, a predictor of latents, and only encoders are exported"):
        export(causal, tmp_path / "out")
    broken = {name: value.clone() for name, value in content["state_dict"].items()}
    broken["encoder.norm.bias"][0] = float("nan")
    with pytest.raises(UserError, match="are not finite"):
        export(write(state_dict=broken), tmp_path / "out", weights="online")
    with pytest.raises(UserError, match="--format onnx is not known; use transformers or torch-export"):
        export(causal, tmp_path / "out", format="onnx")
    assert not (tmp_path / "out").exists()


def test_a_traced_program_gives_the_same_for_any_number_of_clips(checkpoint, tmp_path, capsys):
    out = tmp_path / "encoder.pt2"
    cli.main(["export", str(checkpoint), str(out), "--format", "torch-export"])
    assert f'torch.export.load("{out}").module() runs it' in capsys.readouterr().out
    extra = {"marey.json": ""}
    program = torch.export.load(out, extra_files=extra).module()
    loaded = load_encoder(checkpoint)
    for batch in (1, 2, 5):
        video = clips(loaded, batch, seed=batch)
        with torch.inference_mode():
            got, want = program(video), loaded.encoder(loaded.preprocessing.normalize(video))
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
    facts = json.loads(extra["marey.json"])
    assert facts["preprocessing"]["img_size"] == 16
    assert facts["weights"] == "ema"
    with pytest.raises(UserError, match="holds an export already; give --overwrite"):
        export(checkpoint, out, format="torch-export")
    export(checkpoint, out, format="torch-export", overwrite=True, say=lambda _: None)
    said = inspect_text(out)
    assert "an encoder as one program" in said
    assert "uint8 [B, 3, T, S, S]" in said
    assert f'torch.export.load("{out}").module()' in said
    with pytest.raises(UserError, match="is a program that `marey export` traced, from which weights are not taken"):
        load_encoder(out)
    torch.save({"theirs": 1}, tmp_path / "theirs.pt2")
    with pytest.raises(UserError, match="is a file of another kind"):
        export(checkpoint, tmp_path / "theirs.pt2", format="torch-export", overwrite=True)
    with pytest.raises(UserError, match=r"must end in \.pt2"):
        export(checkpoint, tmp_path / "encoder.onnx", format="torch-export")


def test_the_command_exports(checkpoint, tmp_path, capsys):
    cli.main(["export", str(checkpoint), str(tmp_path / "cli"), "--weights", "online"])
    said = capsys.readouterr().out
    assert "online weights" in said
    assert "receipt.json names this machine's host and paths" in said
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "cli").iterdir()}
    assert len(modes) == 1, "files of one export are readable by the same people"


def test_inspect_says_what_an_export_is(exported):
    text = inspect_text(exported)
    assert "an encoder that `marey export` wrote" in text
    assert "block_causal attention, tiled positions" in text
    assert "AutoModel.from_pretrained" in text
    weights = inspect_text(exported / "model.safetensors")
    assert "model.safetensors OUT.ckpt`; rope_layout, attn_mode and preprocessing are what it says of itself" in weights
    (exported / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"without its model\.safetensors"):
        inspect_text(exported)
