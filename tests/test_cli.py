"""The command line people script against: its commands and options are frozen here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from marey import cli
from marey.core.errors import UserError

FROZEN = {
    "demo": ["--out", "--seed", "--steps", "--videos"],
    "embed": [
        "--batch", "--clips-per-video", "--device", "--overwrite", "--per", "--weights", "checkpoint", "out", "source",
    ],
    "encode": ["--codec", "--dtype", "--option", "--text-column", "--texts", "out", "source"],
    "ingest": [
        "--episode-length", "--labels", "--quality", "--rate", "--short-edge", "--stall", "--workers", "out", "sources",
    ],
    "inspect": ["--config", "path"],
    "make-config": ["--out", "--weights", "manifests"],
    "plan": ["--config-dir", "--config-name", "overrides"],
    "probe": [
        "--batch", "--clips-per-video", "--device", "--json", "--label-column", "--labels", "--seed", "--test",
        "--weights", "checkpoint", "data",
    ],
    "rollout": [
        "--clip", "--clips", "--codec", "--data", "--device", "--guidance", "--horizon", "--option", "--out",
        "--prefix", "--seed", "--steps", "--text", "--weights", "checkpoint",
    ],
    "train": ["overrides"],
}  # fmt: skip


def commands() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(subparsers.choices)


def test_the_command_list_is_frozen() -> None:
    found = {
        name: sorted(
            action.option_strings[0] if action.option_strings else action.dest
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        )
        for name, parser in commands().items()
    }
    assert found == FROZEN


@pytest.mark.parametrize("words", [[], ["inspct"], ["embed"], ["ingest", "a", "b", "--workers", "0"]])
def test_a_wrong_command_line_is_one_sentence_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("marey: ")


def test_a_refusal_is_one_sentence_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("the folder is empty;\n  name another")

    with pytest.raises(SystemExit) as ended:
        cli._guarded(refuse, debug=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "marey: the folder is empty; name another\n"


def test_debug_shows_the_traceback_of_a_refusal() -> None:
    def refuse() -> None:
        raise UserError("no")

    with pytest.raises(UserError):
        cli._guarded(refuse, debug=True)


def test_a_bug_is_not_dressed_up_as_a_refusal() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli._guarded(fail, debug=False)


def test_the_readme_names_every_command() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    missing = [name for name in FROZEN if f"marey {name}" not in readme]
    assert not missing


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["probe", "--help"]])
def test_help_needs_no_room(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "marey", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout
