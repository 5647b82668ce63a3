"""Every command and every line of code on docs/exporting.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from marey import cli
from marey.evaluation import embed as embed_room
from marey.evaluation.export_card import LINES
from tests.evaluation.coloured_source import ColouredSource

PAGE = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_lines_are_those_of_the_model_card() -> None:
    assert LINES in blocks("python")


def test_commands_and_code_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embed_room, "open_clips", lambda _path, _given: ColouredSource([0, 1]))
    assert checkpoint.name == "last.ckpt"
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("marey ")]
    assert [line.split()[1] for line in commands] == ["export", "export", "import", "embed"]
    for line in commands:
        if " import " in line:  # a download lies where the person put it
            Path("my-encoder/model.safetensors").rename("model.safetensors")
        cli.main(line.split()[1:])
    said = capsys.readouterr().out
    for name in ("my-encoder", "my-encoder.pt2", "published.ckpt", "features.parquet"):
        assert f"{name}: " in said
        assert Path(name).exists()
    _, program, streaming = blocks("python")
    names: dict[str, object] = {}
    exec(program.replace("4, 3, 16, 224, 224", "2, 3, 4, 16, 16"), names)
    assert tuple(names["tokens"].shape) == (2, 17, 128)  # type: ignore[attr-defined]
    names = {"frame": torch.zeros(1, 3, 1, 16, 16)}
    exec(streaming, names)
    assert tuple(names["got"].summary.shape) == (1, 1, 128)  # type: ignore[attr-defined]
