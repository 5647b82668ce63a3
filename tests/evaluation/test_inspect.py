from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import lance
import pyarrow as pa
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import save_file

from marey.core.errors import UserError
from marey.evaluation.inspect import inspect_text
from marey.training.lock import alone_in

from .causal_cases import causal_checkpoint, small_config


def test_a_checkpoint_says_which_experiment_it_is(checkpoint, content):
    text = inspect_text(checkpoint)
    for words in (
        "smoke",
        "nothing about learning",
        "optimizer step 40, epoch 2, micro-step 40",
        "effective 16 (recipe: 8), statistic 16 (recipe: 8), BatchNorm group 8, world size 2",
        "vit_nano, width 128, 4 blocks",
        "4 x 16 x 16 as [B,C,T,H,W], consecutive frames stored at 15/s, short side to 16",
        "20 updates, 1.5% still where it started",
        "20260101-000000-abcdef",
        "code 0123456789ab",
    ):
        assert words in text
    values = sum(tensor.numel() for tensor in content["state_dict"].values())
    assert f"{len(content['state_dict'])} tensors, {values:,} values" in text
    assert content["marey"]["keys"]["state_dict"] in text
    assert len(text.splitlines()) < 16


def test_config_is_printed_back_as_yaml(checkpoint, content):
    text = inspect_text(checkpoint, show_config=True)
    assert yaml.safe_load(text.split("\n\n", 1)[1]) == content["marey"]["config"]


def test_a_checkpoint_without_an_average_says_so(write):
    assert "absent (ema.enabled=false)" in inspect_text(write(state_dict_ema=None))


def test_a_causal_checkpoint_says_what_it_predicts_and_how_it_was_batched(tmp_path: Path):
    path = causal_checkpoint(tmp_path / "c.ckpt", "data.train=m.csv", "data.batching.mode=packed")
    text = inspect_text(path)
    for words in (
        "a Marey causal checkpoint",
        "optimizer step 40",
        "samples: effective 4, world size 2",
        "latents [B,C,T,H,W] of 48 channels, the first on a canvas of 4 x 4, 15 latent frames/s, codec patch-1 patch=4",
        "video transformer, width 16, 1 blocks, 2 heads, patches of 1 x 2 x 2 latent cells",
        "prefix_suffix, without text, given + predicted frames 1+3, 2+4; 2 samples per rank, mode packed",
        "m.csv",
        "roll out with these",
        "absent (ema.enabled=false)",
    ):
        assert words in text
    assert len(text.splitlines()) < 16


def test_a_causal_run_says_its_program_and_sources(tmp_path: Path):
    sources = [{"name": "a", "path": "/d/a.csv", "clips": 12, "windows": 30}]
    config = {**small_config("data.train=a.csv").model_dump(mode="json")}
    receipt = {**RECEIPT, "kind": "causal", "config": config, "data": {"name": "a", "train": sources}}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    (tmp_path / "metrics.csv").write_text("step,train/loss,padding_share\n20,0.5,0.25\n")
    text = inspect_text(tmp_path)
    for words in ("a (/d/a.csv): 12 clips, 30 windows", "prefix_suffix", "mode bucket", "padding_share 0.25"):
        assert words in text


def test_a_manifest_says_what_it_holds_and_who_made_it(tmp_path: Path):
    table = 'clip_id,path,length_frames,height,width,text,fps,mine\na,a.npy,8,4,6,"x, y",8,1\nb,b.npy,6,4,4,,8,2\n'
    (tmp_path / "m.csv").write_text(table)
    for name in "ab":
        (tmp_path / f"{name}.npy").write_bytes(b"")
    text = inspect_text(tmp_path / "m.csv")
    for words in (
        "a manifest of stored latents",
        "2 of 2 recordings",
        "14 latent frames, 6 to 8 a clip, 0.0 minutes at 8 a second",
        "4 x 4 (1), 4 x 6 (1)",
        "1 clip has one, 1 different",
        "not recorded",
        "mine",
    ):
        assert words in text
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq

    pq.write_table(pacsv.read_csv(tmp_path / "m.csv"), tmp_path / "m.parquet")
    assert inspect_text(tmp_path / "m.parquet").splitlines()[1:-1] == text.splitlines()[1:-1]
    (tmp_path / "a.npy").unlink()
    with pytest.raises(UserError, match=r"row 1, column path"):
        inspect_text(tmp_path / "m.csv")
    (tmp_path / "videos.csv").write_text("path,label\na.mp4,1\n")
    with pytest.raises(UserError, match=r"no manifest of latents and, as a list of videos, faulty: .*a\.mp4 does not"):
        inspect_text(tmp_path / "videos.csv")
    (tmp_path / "a.mp4").touch()
    assert f"marey ingest {tmp_path}/videos.csv OUT.lance" in inspect_text(tmp_path / "videos.csv")


RECEIPT = {
    "format": 1,
    "run_id": "r1",
    "status": "finished",
    "how_it_ended": "finished after 20 optimizer steps",
    "started": "2026-01-01T00:00:00+00:00",
    "checkpoint_dir": "/runs/ck",
    "code": {"version": "0.1.0", "commit": "0123456789abcdef", "modified": True},
    "differences_from_recipe": ["seed=1 (recipe: 0)"],
    "batch": {
        "world_size": 8,
        "effective_batch": 1536,
        "statistic_batch": 768,
        "norm_group": 96,
        "recipe": {"effective_batch": 3072, "statistic_batch": 1536, "norm_group": 96},
    },
    "steps": {"total_steps": 20},
    "seed": 1,
    "precision": "32-true",
    "data": {
        "train": [{"name": "wt", "path": "wt.lance", "episodes": 6067, "clips_per_epoch": 12, "dropped_short": 0}]
    },
    "ema": {"rule": "every 32 steps"},
    "consumed": {"optimizer_steps": 20, "clips": [30720]},
    "checkpoints": [{"path": "/runs/ck/epoch-0000-step-0000020.ckpt", "step": 20}],
    "checkpoint_keys": {"state_dict": "the weights"},
    "config": {"recipe": {"name": "demo", "source": "here", "claims": "that it runs"}},
}


def test_a_run_folder_and_its_receipt_say_the_same(tmp_path: Path):
    (tmp_path / "receipt.json").write_text(json.dumps(RECEIPT))
    (tmp_path / "metrics.csv").write_text("step,train/loss,train/embedding_rank\n1,0.9,2\n20,0.51234567,33.3\n")
    folder, file = inspect_text(tmp_path), inspect_text(tmp_path / "receipt.json")
    assert folder.splitlines()[1:] == file.splitlines()[1:]
    for words in (
        "20 of 20 optimizer steps, 30,720 clips seen",
        "effective 1,536 (recipe: 3,072), statistic 768 (recipe: 1,536), BatchNorm group 96, world size 8",
        "wt (wt.lance): 6,067 episodes, 12 clips an epoch",
        "step 20, loss 0.5123, embedding_rank 33.3",
        "seed=1 (recipe: 0)",
        "commit 0123456789ab with changes, seed 1",
        "1 in /runs/ck, the newest epoch-0000-step-0000020.ckpt",
        "demo (here); it can claim that it runs",
    ):
        assert words in folder
    assert "recipe:" in inspect_text(tmp_path, show_config=True)


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path):
    begun = {**RECEIPT, "status": "running", "how_it_ended": "", "consumed": {}, "checkpoints": []}
    (tmp_path / "receipt.json").write_text(json.dumps(begun))
    text = inspect_text(tmp_path)
    assert "running" in text
    assert "none yet, to go to /runs/ck" in text


def make_store(path: Path, metadata: dict[str, object] | None = None, **columns: pa.Array) -> Path:
    table = pa.table(
        {
            "episode_idx": pa.array([0, 0, 0, 1, 1], pa.int32()),
            "step_idx": pa.array([0, 1, 2, 0, 1], pa.int32()),
            "frame": pa.array([b"x"] * 5),
            "h": pa.array([48] * 5),
            "w": pa.array([64] * 5),
            "label": pa.array([1, 1, 1, None, None], pa.int64()),
            **columns,
        }
    )
    if metadata is not None:
        table = table.replace_schema_metadata({"marey": json.dumps(metadata)})
    lance.write_dataset(table, str(path))
    return path


def test_a_store_says_what_it_holds(tmp_path: Path):
    own = {"rate": 15.0, "quality": 90, "label_names": ["cat", "dog"], "refused": 2}
    text = inspect_text(make_store(tmp_path / "a.lance", own, source=pa.array(["a.mp4"] * 3 + ["b.mp4"] * 2)))
    for words in (
        "2, 2 to 3 frames each",
        "at 15 frames/s",
        "48 x 64, JPEG quality 90",
        "2; 2 files refused",
        "1 class: dog",
    ):
        assert words in text


def test_a_store_made_elsewhere_and_a_table_that_is_no_store(tmp_path: Path):
    text = inspect_text(make_store(tmp_path / "foreign"))
    assert "frames/s not recorded" in text
    assert "another program" in text
    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "t.lance"))
    assert "no frame store" in inspect_text(tmp_path / "t.lance")


def test_files_of_other_programs_are_told_for_what_they_are(tmp_path: Path):
    path = tmp_path / "theirs.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(3, 2)}, "pytorch-lightning_version": "2.6", "global_step": 7}, path)
    assert "Marey did not write" in inspect_text(path)
    assert "1 tensor, 6 values" in inspect_text(path)
    torch.save({"w": torch.zeros(4)}, path)
    assert "1 tensor, 4 values, at the top level" in inspect_text(path)
    released = {
        "encoder.cls_token": torch.zeros(1, 1, 8),
        "encoder.patch_embed.proj.weight": torch.zeros(8, 3, 1, 4, 4),
        "encoder.blocks.0.norm1.weight": torch.zeros(8),
        "encoder.blocks.1.norm1.weight": torch.zeros(8),
    }
    save_file(released, tmp_path / "w.safetensors")
    text = inspect_text(tmp_path / "w.safetensors")
    assert "width 8, 2 blocks, patches of 1 x 4 x 4" in text
    assert "rope_layout" in text


@pytest.mark.parametrize(
    ("name", "make", "reason"),
    [
        ("none", lambda p: None, "does not exist"),
        ("none.lance", lambda p: None, "marey ingest"),
        ("half.lance", lambda p: p.with_name("half.lance.partial").mkdir(), "unfinished"),
        ("plain.lance", lambda p: p.mkdir(), r"not a Lance table \(it has no _versions folder\)"),
        ("folder", lambda p: p.mkdir(), "holds no run"),
        ("a.mp4", lambda p: p.write_bytes(b"x"), "is a video"),
        ("a.ckpt", lambda p: p.write_bytes(b""), "is empty"),
        ("a.json", lambda p: p.write_text("[1]"), "no receipt"),
        ("b.json", lambda p: p.write_text("{"), "not a readable receipt"),
        ("c.txt", lambda p: p.write_text("hello"), "as a list of videos, faulty: .*line 1: hello does not exist"),
        ("c.bin", lambda p: p.write_text("hello"), "not a PyTorch checkpoint"),
        ("d.safetensors", lambda p: p.write_text("hello"), "not a readable safetensors"),
        ("e.parquet", lambda p: p.write_text("hello"), "not a readable Parquet"),
    ],
)
def test_what_is_nothing_known_is_refused_in_a_sentence(tmp_path: Path, name, make, reason):
    make(tmp_path / name)
    with pytest.raises(UserError, match=reason) as refused:
        inspect_text(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)


def test_videos_in_a_folder_are_found_as_an_ingest_finds_them(tmp_path: Path):
    for name in ("my set/run/deep/1.WMV", "my set/jump/2.ogv", "more/sub/3.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    text = inspect_text(tmp_path / "my set")
    assert "class folders, 2 videos in 2 classes" in text
    assert f"`marey ingest '{tmp_path}/my set' OUT.lance`" in text
    assert "folder, 1 video, no labels" in inspect_text(tmp_path / "more")
    with pytest.raises(UserError, match="is a video"):
        inspect_text(tmp_path / "my set/jump/2.ogv")


def test_a_suggested_command_holds_a_path_with_spaces_as_one_word(tmp_path: Path):
    line = next(x for x in inspect_text(make_store(tmp_path / "my store.lance")).splitlines() if "marey train" in x)
    words = shlex.split(line)
    (parsed,) = OverridesParser.create().parse_overrides(words[-1:])
    assert parsed.value() == str(tmp_path / "my store.lance")
    (tmp_path / "a b.mp4").touch()
    with pytest.raises(UserError, match=r"`marey ingest '.*/a b\.mp4' OUT\.lance`"):
        inspect_text(tmp_path / "a b.mp4")
    with pytest.raises(UserError, match=r"`marey ingest FOLDER '.*/no store\.lance'`"):
        inspect_text(tmp_path / "no store.lance")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("metrics.csv", "the curve of a run"),
        ("config.yaml", "the resolved configuration of a run"),
        ("exposure", "how much of each source"),
        ("exposure/step-0000020.parquet", "how much of each source"),
        ("probe.json", "the probe results"),
    ],
)
def test_a_file_of_a_run_is_named_and_points_to_the_run(tmp_path: Path, name: str, words: str):
    run = tmp_path / "my run"
    (run / "exposure").mkdir(parents=True)
    (run / "receipt.json").write_text(json.dumps(RECEIPT))
    if name != "exposure":
        (run / name).write_text("step\n1\n")
    text = inspect_text(run / name)
    assert words in text
    assert f"marey inspect '{run}'" in text


def test_a_list_of_videos_says_how_it_is_read(tmp_path: Path):
    (tmp_path / "a.mp4").touch()
    (tmp_path / "my list.csv").write_text("path,label\na.mp4,3\n")
    text = inspect_text(tmp_path / "my list.csv")
    assert "CSV with a header, 1 videos, 1 with a label" in text
    assert f"marey ingest '{tmp_path}/my list.csv' OUT.lance" in text


def test_config_is_asked_of_what_has_one(tmp_path: Path):
    store = make_store(tmp_path / "a.lance")
    with pytest.raises(UserError, match="leave out --config"):
        inspect_text(store, show_config=True)


def test_a_run_and_a_store_are_read_without_torch(tmp_path: Path):
    (tmp_path / "receipt.json").write_text(json.dumps(RECEIPT))
    store = make_store(tmp_path / "a.lance")
    script = (
        "import sys; from pathlib import Path; from marey.evaluation.inspect import inspect_text\n"
        f"inspect_text(Path({str(tmp_path)!r})); inspect_text(Path({str(store)!r}))\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_checkpoint_shows_whether_it_is_whole_and_a_hash_of_its_weights(checkpoint: Path, content, tmp_path: Path):
    from marey.core.files import SealingWriter
    from marey.evaluation.checkpoint_file import weights_hash

    state = content["state_dict"]
    digest = weights_hash(state)
    assert f"SHA-256 {digest[:16]}: {content['marey']['keys']['state_dict']}" in inspect_text(checkpoint)
    assert "without the completion marker" in inspect_text(checkpoint)
    name = next(name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel() > 1)
    assert weights_hash(dict(reversed(state.items()))) == digest
    assert weights_hash({**state, name: torch.nextafter(state[name], state[name] + 1)}) != digest
    assert weights_hash({**state, name: state[name].reshape(1, -1)}) != digest
    path = tmp_path / "sealed.ckpt"
    with path.open("wb") as file:
        writer = SealingWriter(file)
        torch.save(content, writer)
        writer.seal()
    assert "complete and undamaged" in inspect_text(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"is damaged: .*SHA-256 does not match"):
        inspect_text(path)


def test_a_run_that_was_killed_shows_how_to_go_on(tmp_path: Path):
    attempts = [{"number": 1, "status": "killed", "to_step": 8}, {"number": 2, "status": "running", "to_step": 12}]
    going_on = {"status": "running", "how_it_ended": "", "resume_command": "cd /x && marey train a=1"}
    (tmp_path / "receipt.json").write_text(json.dumps({**RECEIPT, **going_on, "attempts": attempts}))
    text = inspect_text(tmp_path)
    assert "cd /x && marey train a=1" in text
    assert "2; before this one: killed at step 8" in text
    here = {**RECEIPT, **going_on, "host": {"name": platform.node()}, "updated": "2026-01-31T12:00"}
    (tmp_path / "receipt.json").write_text(json.dumps(here))
    with alone_in([("hydra.run.dir", tmp_path)], run_dir=tmp_path):
        assert "It is still running" in inspect_text(tmp_path)
    (tmp_path / ".marey.lock").touch()  # what a killed process leaves: the file, and nobody who holds it
    assert "It left no word after" in inspect_text(tmp_path)
