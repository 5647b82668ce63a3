"""Receipts, run folders and files of any kind, damaged: `marey inspect` says what they are or refuses in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marey.evaluation.inspect import inspect_text
from tests.fuzz.mutations import FAST, VALUES, damaged, replaced, said

RECEIPT: dict[str, Any] = {
    "format": 1,
    "kind": "encoder",
    "run_id": "20260101-000000-abc123",
    "status": "finished",
    "how_it_ended": "finished after 8 optimizer steps",
    "started": "2026-01-01T00:00:00+00:00",
    "updated": "2026-01-01T00:01:00+00:00",
    "ended": "2026-01-01T00:01:00+00:00",
    "command": ["marey", "train", "recipe=smoke"],
    "run_dir": "/runs/a",
    "checkpoint_dir": "/runs/a/checkpoints",
    "resumed_from": None,
    "code": {"version": "0.1.0", "commit": "0" * 40, "modified": False},
    "recipe": {"name": "smoke", "source": "", "public": [], "not_public": [], "claims": []},
    "differences_from_recipe": ["seed=1 (recipe: 0)"],
    "batch": {
        "world_size": 1,
        "batch_size": 4,
        "effective_batch": 4,
        "statistic_batch": 4,
        "norm_group": 4,
        "recipe": {"effective_batch": 4, "statistic_batch": 4},
    },
    "steps": {"total_steps": 8, "micro_steps_per_epoch": 4},
    "seed": 0,
    "precision": "32-true",
    "data": {"name": "custom", "train": [{"name": "a", "path": "/a.lance", "episodes": 24, "clips_per_epoch": 24}]},
    "parameters": {"encoder": 10, "projector": 5, "total": 15},
    "ema": {"enabled": True, "decay": 0.99, "update_every": 1, "rule": "decay 0.99", "updates": 8},
    "consumed": {"optimizer_steps": 8, "clips": 32, "tokens": 100, "per_source": []},
    "checkpoints": [{"path": "/runs/a/checkpoints/step-0000008.ckpt", "step": 8}],
    "checkpoint_keys": {"state_dict": "what training updates", "state_dict_ema": "the average"},
    "config": {
        "objective": "invariance",
        "recipe": {"name": "smoke"},
        "model": {"name": "tiny", "img_size": 32, "num_frames": 4, "token_drop_rate": 0.5},
        "loader": {"batch_size": 4},
        "data": {"name": "custom", "train": "/a.lance"},
    },
}
METRICS = b"step,wall_seconds,train/loss,padding_share\n4,1.0,2.5,0.0\n8,2.0,1.25,0.0\n"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "metrics.csv").write_bytes(METRICS)
    (folder / "receipt.json").write_text(json.dumps(RECEIPT))
    return folder


def looked_at(path: Path) -> None:
    for show in (False, True):
        text = said(lambda show=show: inspect_text(path, show_config=show))  # type: ignore[misc]
        assert text is None or "\n" not in text.strip() or len(text) < 4000


def test_a_sound_run_is_described(run_folder: Path) -> None:
    text = inspect_text(run_folder)
    assert "8 of 8 optimizer steps" in text
    assert "loss 1.25" in text


@FAST
@given(receipt=replaced(RECEIPT))
@example(receipt=RECEIPT | {"consumed": {"optimizer_steps": "8", "clips": ["a"]}})
@example(receipt=RECEIPT | {"checkpoints": {"a": 1}})
@example(receipt=RECEIPT | {"checkpoint_keys": ["a"]})
@example(receipt=RECEIPT | {"code": "x"})
@example(receipt=RECEIPT | {"data": {"train": [{"episodes": "many"}]}})
def test_a_receipt_with_other_values_is_described_or_refused(run_folder: Path, receipt: Any) -> None:
    (run_folder / "receipt.json").write_text(json.dumps(receipt))
    looked_at(run_folder)
    looked_at(run_folder / "receipt.json")


@FAST
@given(data=damaged(json.dumps(RECEIPT).encode()))
@example(data=b"")
@example(data=b"[" * 100_000)
@example(data=b"\xff\xfe")
@example(data=b"null")
@example(data=b"9" * 5000)
def test_a_damaged_receipt_is_described_or_refused(run_folder: Path, data: bytes) -> None:
    (run_folder / "receipt.json").write_bytes(data)
    looked_at(run_folder)


@FAST
@given(receipt=VALUES)
def test_anything_in_place_of_a_receipt_is_refused(run_folder: Path, receipt: Any) -> None:
    (run_folder / "receipt.json").write_text(json.dumps(receipt))
    looked_at(run_folder)


@FAST
@given(data=damaged(METRICS))
@example(data=b"step,train/loss\n1," + b"9" * 200_000 + b"\n")
@example(data=b"step\x00\n")
@example(data=b"\xff\xfe\n1")
def test_damaged_metrics_leave_the_run_described(run_folder: Path, data: bytes) -> None:
    (run_folder / "metrics.csv").write_bytes(data)
    looked_at(run_folder)


@FAST
@given(
    data=st.binary(max_size=64),
    name=st.sampled_from(["a.ckpt", "a.csv", "a.parquet", "a.safetensors", "a.json", "a.txt"]),
)
@example(data=b"", name="a.ckpt")
@example(data=b"PK\x03\x04" + b"\x00" * 60, name="a.ckpt")
@example(data=b"\x10\x00\x00\x00\x00\x00\x00\x00{}", name="a.safetensors")
@example(data=b"\xff\xff\xff\xff\xff\xff\xff\x7f{", name="a.safetensors")
@example(data=b"clip_id,path,length_frames\n", name="a.csv")
@example(data=b"path,label\n\x00,1\n", name="a.csv")
def test_any_file_is_described_or_refused(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    looked_at(tmp_path / name)
