from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from marey.core.errors import UserError
from marey.core.pixelstats import normalize_video
from marey.evaluation.checkpoint_file import starting_share
from marey.evaluation.inspect import inspect_text
from marey.evaluation.loading import load_encoder, random_twin, resolve_device
from marey.evaluation.preprocessing import Preprocessing


class Harmful:
    """What a stranger's file may hold: unpickling it would run a command."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return (Path.touch, (self.proof,))


def test_the_weights_asked_for_are_the_weights_loaded(checkpoint, content):
    for weights, key in (("online", "state_dict"), ("ema", "state_dict_ema"), (None, "state_dict_ema")):
        loaded = load_encoder(checkpoint, weights=weights)
        want = {k.removeprefix("encoder."): v for k, v in content[key].items() if k.startswith("encoder.")}
        got = loaded.encoder.state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert loaded.info.weights == (weights or "ema")
    assert (loaded.info.step, loaded.info.epoch) == (40, 2)
    assert not loaded.encoder.training
    assert not any(parameter.requires_grad for parameter in loaded.encoder.parameters())


def test_an_average_under_another_key_is_found(write, content):
    about = {**content["marey"], "keys": {"state_dict": "online", "slow": "a slow copy"}}
    path = write(state_dict_ema=None, slow=content["state_dict_ema"], marey=about)
    loaded = load_encoder(path)
    name = "blocks.0.attn.qkv.weight"
    assert loaded.info.weights == "ema"
    assert torch.equal(loaded.encoder.state_dict()[name], content["state_dict_ema"]["encoder." + name])
    assert load_encoder(path, weights="ema").info.weights == "ema"
    (line,) = [line for line in inspect_text(path).splitlines() if line.split()[:1] == ["slow"]]
    assert "a slow copy; 20 updates" in line
    assert "ema.enabled=false" not in inspect_text(path)


def test_without_an_average_the_default_is_the_trained_weights(write):
    assert load_encoder(write(state_dict_ema=None)).info.weights == "online"
    with pytest.raises(UserError, match=r"no EMA weights.*--weights online"):
        load_encoder(write(state_dict_ema=None), weights="ema")


def test_an_average_that_is_still_its_start_is_told(write, content):
    young = dict(content["marey"], ema={"updates": 2, "decay": 0.9999, "update_every": 32, "compensate": False})
    info = load_encoder(write(marey=young)).info
    assert info.starting_share == pytest.approx(0.9999**2)
    assert "100% of the EMA weights" in (info.remark() or "")
    assert load_encoder(write(marey=young), weights="online").info.remark() is None


def test_the_starting_share_is_the_product_of_the_decays():
    compensated = {"updates": 312, "decay": 0.9999, "update_every": 32, "compensate": True}
    assert starting_share(compensated) == pytest.approx(0.9999 ** (32 * 312))
    assert starting_share({**compensated, "compensate": False}) == pytest.approx(0.9999**312)


def test_a_random_twin_has_the_architecture_and_not_the_weights(checkpoint, content):
    loaded = load_encoder(checkpoint, weights="ema")
    twin, again, other = random_twin(loaded), random_twin(loaded), random_twin(loaded, seed=7)
    name = "blocks.0.attn.qkv.weight"
    assert twin.state_dict()[name].shape == loaded.encoder.state_dict()[name].shape
    assert not torch.equal(twin.state_dict()[name], loaded.encoder.state_dict()[name])
    assert torch.equal(twin.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(twin.state_dict()[name], other.state_dict()[name])
    # The run took no step, so its own seed gives back the weights it saved.
    assert torch.equal(twin.state_dict()[name], content["state_dict"]["encoder." + name])


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    proof, path = tmp_path / "proof", tmp_path / "bad.ckpt"
    torch.save({"state_dict": {}, "marey": Harmful(proof)}, path)
    with pytest.raises(UserError, match="would execute code"):
        load_encoder(path)
    assert not proof.exists()


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no checkpoint")


def test_every_file_that_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, checkpoint, content):
    made = {
        "cut.ckpt": lambda p: p.write_bytes(checkpoint.read_bytes()[:5000]),
        "text.ckpt": lambda p: p.write_text("hello"),
        "empty.ckpt": lambda p: p.write_bytes(b""),
        "zip.ckpt": _zip,
        "w.safetensors": lambda p: save_file({"a": torch.zeros(2)}, p),
        "renamed.ckpt": lambda p: save_file({"a": torch.zeros(2)}, p),
        "tensor.ckpt": lambda p: torch.save(torch.zeros(3), p),
        "foreign.ckpt": lambda p: torch.save({"state_dict": {"a": torch.zeros(2)}}, p),
        "future.ckpt": lambda p: torch.save({**content, "marey": {**content["marey"], "format": 9}}, p),
        "other.ckpt": lambda p: torch.save(
            {**content, "state_dict_ema": None, "state_dict": {"policy.a": torch.zeros(1)}}, p
        ),
        "old.ckpt": lambda p: torch.save(content, p, _use_new_zipfile_serialization=False),
    }
    reasons = {
        "cut": "damaged",
        "text": "not a PyTorch checkpoint",
        "empty": "is empty",
        "zip": "cannot be read",
        "w": "safetensors",
        "renamed": "safetensors",
        "tensor": "no `state_dict`",
        "foreign": "does not say what it is",
        "future": "format 9",
        "other": r"no `encoder\.\*` weights",
        "old": "before 2020",
    }
    for name, make in made.items():
        path = tmp_path / name
        make(path)
        with pytest.raises(UserError, match=reasons[name.split(".")[0]]) as refused:
            load_encoder(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_say_where_to_look(tmp_path, checkpoint):
    with pytest.raises(UserError, match="does not exist"):
        load_encoder(tmp_path / "none.ckpt")
    with pytest.raises(UserError, match=rf"is a folder.*try {checkpoint}"):
        load_encoder(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_refused(write, content):
    config = {**content["marey"]["config"], "model": {**content["marey"]["config"]["model"], "patch_size": 4}}
    with pytest.raises(UserError, match=r"do not fit the model.*patch_embed"):
        load_encoder(write(marey={**content["marey"], "config": config}))
    config = {**config, "model": {**config["model"], "name": "vit_tinny"}}
    with pytest.raises(UserError, match=r"configuration that cannot be read"):
        load_encoder(write(marey={**content["marey"], "config": config}))


def test_preprocessing_normalises_as_training_does(checkpoint):
    preprocessing = load_encoder(checkpoint).preprocessing
    video = torch.randint(0, 256, (2, 3, 4, 16, 16), dtype=torch.uint8)
    assert torch.equal(preprocessing.normalize(video), normalize_video(video))


def test_a_swapped_axis_order_is_named(checkpoint):
    preprocessing = load_encoder(checkpoint).preprocessing
    with pytest.raises(UserError, match="this looks like B,T,C,H,W"):
        preprocessing.normalize(torch.zeros(2, 4, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UserError, match="before normalisation"):
        preprocessing.normalize(torch.zeros(2, 3, 4, 16, 16))


def test_a_preprocessing_of_another_layout_or_half_a_one_is_refused(content):
    raw = content["marey"]["preprocessing"]
    with pytest.raises(UserError, match="layout 'B,T,C,H,W'"):
        Preprocessing.from_dict({**raw, "layout": "B,T,C,H,W"}, where="x")
    with pytest.raises(UserError, match="incompletely"):
        Preprocessing.from_dict({k: v for k, v in raw.items() if k != "std"}, where="x")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="is not a device"):
        resolve_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no such device"):
            resolve_device("cuda")
        with pytest.raises(UserError, match="not supported"):
            resolve_device("meta")
        assert resolve_device("auto") == torch.device("cpu")


def test_loading_reads_no_more_than_it_needs(write):
    # Optimizer state is twice the weights: mapped, it costs nothing to leave where it is.
    path = write(optimizer_states=[{"m": torch.zeros(40_000_000)}])
    start = time.process_time()
    load_encoder(path)
    assert time.process_time() - start < 1.0


def test_a_run_folder_names_the_checkpoints_of_its_receipt(tmp_path: Path, checkpoint):
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    kept.mkdir()
    (run / "receipt.json").write_text(json.dumps({"config": {}, "checkpoint_dir": str(kept)}))
    with pytest.raises(UserError, match=rf"this run's go to {kept}, which holds none"):
        load_encoder(run)
    checkpoint.rename(kept / "last.ckpt")
    with pytest.raises(UserError, match=rf"this run's are in {kept}: try {kept}/last\.ckpt"):
        load_encoder(run)
