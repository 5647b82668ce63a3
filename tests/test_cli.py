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
    "doctor": ["--clips", "--config-dir", "--config-name", "--limit", "data"],
    "embed": [
        "--batch", "--clips-per-video", "--device", "--overwrite", "--per", "--stream", "--weights", "checkpoint",
        "out", "source",
    ],
    "encode": ["--codec", "--dtype", "--option", "--text-column", "--texts", "out", "source"],
    "export": ["--format", "--overwrite", "--weights", "checkpoint", "out"],
    "import": ["--overwrite", "--rate", "file", "out", "overrides"],
    "ingest": [
        "--episode-length", "--labels", "--quality", "--rate", "--short-edge", "--stall", "--workers", "out", "sources",
    ],
    "inspect": ["--config", "path"],
    "make-config": ["--out", "--weights", "manifests"],
    "plan": ["--config-dir", "--config-name", "overrides"],
    "probe": [
        "--batch", "--clips-per-video", "--device", "--json", "--label-column", "--labels", "--labels-per-class",
        "--no-attentive", "--no-cache", "--seed", "--test", "--views", "--weights", "checkpoint", "data",
    ],
    "report": ["--clips", "--data", "--out", "run_folder"],
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


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["plan", "a=1", "--config-name", "causal_video", "b=2"], {"overrides": ["a=1", "b=2"]}),
        (["plan", "train", "a=1", "--config-name=causal_video"], {"overrides": ["a=1"]}),
        (["plan", "--config-name", "causal_video"], {"overrides": []}),
        (["doctor", "D", "--config-name", "causal_video", "a=1", "--clips", "2"], {"data": ["D", "a=1"], "clips": 2}),
    ],
)
def test_options_of_plan_and_doctor_stand_anywhere(
    words: list[str], read: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[argparse.Namespace] = []
    for name in ("_plan", "_doctor"):
        monkeypatch.setattr(cli, name, seen.append)
    cli.main(words)
    (arguments,) = seen
    found = vars(arguments)
    assert {key: found[key] for key in read} == read
    assert (arguments.command, arguments.config_name) == (words[0], "causal_video")
    with pytest.raises(SystemExit):
        cli.main([*words, "--confg-name", "x"])


def test_a_refusal_is_one_sentence_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("the folder is empty;\n  name another")

    with pytest.raises(SystemExit) as ended:
        cli._guarded(refuse, debug=False)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "marey: the folder is empty; name another\n"


def test_debug_shows_the_traceback_of_a_refusal_and_still_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("no")

    with pytest.raises(SystemExit) as ended:
        cli._guarded(refuse, debug=True)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("\nmarey: no\n")


@pytest.mark.parametrize("words", [["--debug", "train", "recipe=smok"], ["train", "recipe=smok", "--debug"]])
def test_debug_may_stand_before_or_after_train(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("marey: recipe=smok does not exist; did you mean recipe=smoke?\n")


def test_training_stopped_at_once_does_not_exit_with_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from marey.training import application

    def stop(_words: list[str]) -> None:
        raise KeyboardInterrupt("stopped at once; work is lost")

    monkeypatch.setattr(application, "run_application", stop)
    with pytest.raises(SystemExit) as ended:
        cli.train([])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "marey: stopped at once; work is lost\n"


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


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999999", str(2**63), "one"])
@pytest.mark.parametrize("words", [["demo"], ["probe", "a.ckpt", "data"]])
def test_a_seed_that_no_key_can_hold_is_refused(
    words: list[str], seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, f"--seed={seed}"])
    assert ended.value.code == 2
    assert f"{seed!r} is not a whole number from 0" in capsys.readouterr().err
    assert cli._parser().parse_args([*words, f"--seed={2**63 - 1}"]).seed == 2**63 - 1


def test_a_place_for_the_numbers_is_looked_at_before_the_probe_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import marey.evaluation.probe as room

    monkeypatch.setattr(room, "probe", lambda *_a, **_k: pytest.fail("the probe ran"))
    (tmp_path / "file").touch()
    for place, reason in ((tmp_path, "is a folder"), (tmp_path / "file" / "new" / "x.json", "is not a folder")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["probe", "a.ckpt", "data", "--json", str(place)])
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err


def test_numbers_that_cannot_be_written_are_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import marey.evaluation.probe as room

    class Report:
        def text(self) -> str:
            return "the result"

        def as_dict(self) -> dict[str, object]:
            (tmp_path / "out").touch()  # what was free to be a folder no longer is
            return {}

    monkeypatch.setattr(room, "probe", lambda *_a, **_k: Report())
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", "a.ckpt", "data", "--json", str(tmp_path / "out" / "x.json")])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "the result" in said.out
    assert "cannot be written" in said.err


def test_counts_of_labels_are_a_list_and_all_of_them_are_always_probed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "a.ckpt", "data", "--labels-per-class"]
    assert cli._parser().parse_args([*words, "10, 1,all"]).labels_per_class == (1, 10)
    assert cli._parser().parse_args([*words, "all"]).labels_per_class == ()
    for wrong in ("0", "few", "1,,2", "-3"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words[:3], f"--labels-per-class={wrong}"])
        assert ended.value.code == 2
        assert "is not a list like 1,10,all" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["_ingest", "_embed", "_probe"])
def test_a_request_to_end_is_a_stop_on_request(name: str) -> None:
    module, function = {
        "_ingest": ("marey.pixels.ingest", "ingest"),
        "_embed": ("marey.evaluation.embed", "embed"),
        "_probe": ("marey.evaluation.probe", "probe"),
    }[name]
    words = ["ingest", "a", "b.lance"] if name == "_ingest" else [name[1:], "a.ckpt", "data"]
    words += ["out.parquet"] if name == "_embed" else []
    script = (
        "import sys, time, types\n"
        "def work(*_a, **_k):\n"
        "    print('working', flush=True); time.sleep(60)\n"
        f"sys.modules[{module!r}] = types.SimpleNamespace({function}=work)\n"
        f"from marey import cli; cli.main({words!r})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "working"
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == "marey: stopped on request; files already complete are kept\n"
