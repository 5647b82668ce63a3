"""Every command on docs/probing.md runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from marey import cli
from marey.evaluation import attentive_fit, measure
from marey.evaluation import embed as embed_room
from marey.evaluation import probe as probe_room
from tests.evaluation.coloured_source import ColouredSource

PAGE = (Path(__file__).parents[2] / "docs" / "probing.md").read_text(encoding="utf-8")


def test_commands_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On coloured clips instead of stores; the attentive probe takes a few steps, and few labels are drawn once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path / "cache"))
    for constant, few in (("MIN_STEPS", 4), ("EPOCHS", 1)):
        monkeypatch.setattr(attentive_fit, constant, few)
    monkeypatch.setattr(measure, "DRAWS", 1)
    sources = {
        "clips.lance": ColouredSource([0, 1] * 6, length=12),
        "clips/train.lance": ColouredSource([0, 1] * 6, folder=str(tmp_path / "clips/train")),
        "clips/heldout.lance": ColouredSource([0, 1] * 3, folder=str(tmp_path / "clips/heldout")),
    }
    for room in (probe_room, embed_room):
        monkeypatch.setattr(room, "open_clips", lambda path, _given: sources[path])
    for place in (Path("runs/checkpoints"), Path("RUN")):
        place.mkdir(parents=True)
    assert checkpoint.name == "last.ckpt"
    shutil.copy(checkpoint, "runs/checkpoints/last.ckpt")
    rows = [
        f"{file},{'left' if label else 'right'}"
        for name in ("clips/train.lance", "clips/heldout.lance")
        for file, label in zip(sources[name].files, sources[name].labels, strict=True)
    ]
    Path("labels.csv").write_text("\n".join(["path,motion", *rows]) + "\n", encoding="utf-8")
    (block,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = block.splitlines()
    assert [line.split()[1] for line in commands] == ["probe"] * 4 + ["embed"]
    for line in commands:
        cli.main(line.split()[1:])
        said = capsys.readouterr().out
        if " probe " in line:
            assert ("attentive" in said) == ("--no-attentive" not in line)
            assert ("1 labelled video of each class" in said) == ("--labels-per-class" in line)
    written = json.loads(Path("RUN/probe.json").read_text(encoding="utf-8"))
    assert (written["label"], written["test"], written["test_videos"]) == ("motion", "clips/heldout.lance", 6)
    assert pq.read_table("features.parquet").num_rows == 12
