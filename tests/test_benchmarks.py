"""The one command over all benchmarks, and what their numbers are held against. No test looks at a clock."""

from __future__ import annotations

import ast
import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # as the scripts find each other

import catalogue
import runner
from aims import AIMS, Aim, encoder, judge, packed_against, row
from catalogue import Benchmark
from encoder_step import build_encoder_objective, make_batch, measure
from floor import Product, make_floor, recorded_products
from machine import CANNOT_RUN
from marey.config.compose import load_config
from memory import activations, saved_bytes
from plain_step import plain_loss
from tables import markdown, number
from tests.docs.checks import script_options

BENCHMARKS = Path(catalogue.__file__).parent
SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
GOOD = 'json.dump({"machine": {}, "value": 2.0}, open(sys.argv[-1], "w"))\n'
AIM = Aim("good", "its value", lambda result: float(result["value"]), 3.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scripts of a test lie in place of the benchmarks; the machine is one without an accelerator."""
    monkeypatch.setattr(catalogue, "HERE", tmp_path)
    monkeypatch.setattr(runner, "describe_machine", lambda: {"accelerator": None})
    return tmp_path


def scripts(folder: Path, **sources: str) -> list[Benchmark]:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(f"import json, os, sys\n{source}")
    return [Benchmark(name=name, about=f"what {name} is for") for name in sources]


def index(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "index.json").read_text())
    return found


def test_the_table_names_every_script_of_the_folder() -> None:
    assert {path.stem for path in SCRIPTS} - {"__main__"} == {benchmark.name for benchmark in catalogue.BENCHMARKS}


@pytest.mark.parametrize("benchmark", [b for b in catalogue.BENCHMARKS if not b.command], ids=lambda b: b.name)
def test_every_benchmark_has_a_quick_run_and_json(benchmark: Benchmark) -> None:
    tree = ast.parse(benchmark.script.read_text())
    assert any(isinstance(node, ast.Attribute) and node.attr == "ArgumentParser" for node in ast.walk(tree))
    options = script_options(benchmark.script)
    assert "--json" in options
    assert {word for word in (*benchmark.quick, *benchmark.arguments) if word.startswith("--")} <= options


def test_every_aim_belongs_to_a_benchmark_of_all() -> None:
    assert {aim.benchmark for aim in AIMS} <= {b.name for b in catalogue.BENCHMARKS if not b.apart}


def test_a_failing_benchmark_is_named_and_the_others_still_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = scripts(folder, bad='print("half way")\nraise ValueError("no such thing")', good=f'print("| a |")\n{GOOD}')
    out = folder / "out"
    assert runner.run_all(table, out, quick=True, aims=[AIM]) == 1
    said = capsys.readouterr().out
    assert "FAILED bad: exit status 1" in said
    assert said.rindex("ValueError: no such thing") > said.index("FAILED bad")
    assert [entry["status"] for entry in index(out)["benchmarks"]] == ["failed", "done"]
    assert index(out)["benchmarks"][1]["printed"] == "| a |\n"
    assert index(out)["aims"] == [{"what": "its value", "aim": "at most 3", "measured": "2", "verdict": "met"}]
    assert json.loads((out / "good.json").read_text())["value"] == 2.0


def test_a_benchmark_that_cannot_run_here_is_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = scripts(folder, lacking=f'print("cannot run here: no camera")\nsys.exit({CANNOT_RUN})')
    table.append(Benchmark(name="device", about="never started, and has no script", cuda=True))
    out = folder / "out"
    assert runner.run_all(table, out, quick=True, aims=[AIM._replace(benchmark="device")]) == 0
    said = capsys.readouterr().out
    assert "cannot run here: it needs a CUDA device" in said
    assert said.count("no camera") == 1
    assert "missing (device: cannot run here: it needs a CUDA device" in said
    assert index(out)["benchmarks"][0]["reason"] == "no camera"


def test_a_benchmark_without_json_has_failed_and_an_older_file_does_not_speak_for_it(folder: Path) -> None:
    out = folder / "out"
    table = scripts(folder, good="print('I forgot')\n", other='json.dump({"value": 1}, open(sys.argv[-1], "w"))\n')
    out.mkdir()
    (out / "good.json").write_text('{"machine": {}, "value": 1.0}')
    assert runner.run_all(table, out, quick=True, aims=[AIM]) == 1
    assert [entry["status"] for entry in index(out)["benchmarks"]] == ["failed", "failed"]  # the other: no machine
    assert index(out)["aims"][0]["verdict"].startswith("missing (good: failed: it wrote no good.json")


def test_quick_and_thorough_runs_start_the_script_differently(folder: Path) -> None:
    scripts(folder, good=f"print(sys.argv[1:-2])\n{GOOD}")
    benchmark = Benchmark(name="good", about="", arguments=("--repeats", "3"))
    printed = [runner.run(benchmark, folder, quick=quick, cuda=False).printed for quick in (True, False)]
    assert printed == ["['--quick']\n", "['--repeats', '3']\n"]


def test_one_benchmark_alone_keeps_what_others_left_in_the_folder(folder: Path) -> None:
    out = folder / "out"
    first, second = scripts(folder, good=GOOD, other=GOOD)
    for run in ([first, second], [second]):
        assert runner.run_all(run, out, quick=True, aims=[AIM]) == 0
    assert [entry["name"] for entry in index(out)["benchmarks"]] == ["good", "other"]
    assert index(out)["aims"][0]["verdict"] == "met"


def test_two_runs_into_one_folder_at_a_time_keep_both_results(folder: Path) -> None:
    beside = """
path = os.path.join(os.path.dirname(sys.argv[-1]), "index.json")
entry = {"name": "beside", "status": "failed", "reason": "that of another run"}
json.dump({"benchmarks": [entry]}, open(path, "w"))
"""
    table = scripts(folder, good=beside + GOOD)
    assert runner.run_all(table, folder / "out", quick=True, aims=[AIM]) == 0
    assert [entry["name"] for entry in index(folder / "out")["benchmarks"]] == ["beside", "good"]


CHILD = r"""
import subprocess
code = (
    "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
    "print('locked', flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code, os.path.join(os.path.dirname(sys.argv[-1]), "lock")])
child.wait()
"""


def test_ctrl_c_ends_the_benchmark_with_what_it_started_and_keeps_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = scripts(folder, good=GOOD, hung=CHILD, never="raise SystemExit('too far')")

    def pressed(*words: object, **options: Any) -> None:
        if words == ("locked\n",):
            raise KeyboardInterrupt
        print(*words, **options)

    monkeypatch.setattr(runner, "print", pressed, raising=False)
    assert runner.run_all(table, folder, quick=True, aims=[]) == 130
    assert [entry["name"] for entry in index(folder)["benchmarks"]] == ["good"]
    assert "the benchmark under way was ended" in capsys.readouterr().out
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for ever while the benchmark's own process lives


def test_a_benchmark_that_takes_too_long_is_ended(folder: Path) -> None:
    (benchmark,) = scripts(folder, hung="import time\ntime.sleep(600)")
    outcome = runner.run(benchmark, folder, quick=True, cuda=False, limit=0.5)
    assert (outcome.status, outcome.reason) == ("failed", "not done within 0.5 s")


def test_what_a_benchmark_leaves_behind_does_not_keep_the_others_waiting(folder: Path) -> None:
    (benchmark,) = scripts(folder, gone=f"import subprocess\nsubprocess.Popen(['sleep', '600'])\n{GOOD}")
    outcome = runner.run(benchmark, folder, quick=True, cuda=False, limit=1.0)
    assert (outcome.status, outcome.reason) == ("failed", "not done within 1 s")


def test_the_tables_of_a_run_come_back_as_markdown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = scripts(folder, good=f'print("a machine\\n| a |\\n|---|\\nsaid")\n{GOOD}', plain=f'print("x  1")\n{GOOD}')
    runner.run_all(table, folder, quick=True, aims=[])
    shown = runner.show_tables(folder, [AIM])
    assert "## good: what good is for\n\n`python " in shown
    assert "a machine\n\n| a |\n|---|\n\nsaid" in shown
    assert "```text\nx  1\n```" in shown
    assert shown.endswith("| its value | at most 3 |        2 | met        |")
    with pytest.raises(SystemExit, match=r"has no index\.json"):
        runner.show_tables(folder / "nowhere", [])


def test_names_are_checked_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (["encoder-step"], "did you mean encoder_step?"),
        (["chaos"], "run it by its own command: python benchmarks/chaos.py"),
        (["findings"], "run it by its own command: python benchmarks/findings.py"),  # the runner's limit is an hour
        (["all", "there"], "--out there says where the JSON goes"),
    ):
        with pytest.raises(SystemExit) as stopped:
            runner.main(words)
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err
    assert runner.main(["list"]) == 0
    assert "reliability, not speed" in capsys.readouterr().out


def test_a_value_that_is_not_there_is_said_to_be_missing() -> None:
    below, above = AIM, AIM._replace(at_least=True, unit=" s")
    verdicts = judge([below, above], {"good": {"value": 3.5}}, {})
    assert [v.verdict for v in verdicts] == ["not met", "met"]
    assert verdicts[1].aim == "at least 3 s"
    assert verdicts[1].measured == "3.5 s"
    assert judge([below], {"good": {"value": 3.0}}, {})[0].verdict == "met"
    for results, why in (
        ({}, "was not run"),
        ({"good": {}}, "its JSON has no such value"),
        ({"good": None}, "no such"),
    ):
        (verdict,) = judge([below], results, {})
        assert verdict.verdict.startswith("missing (good: ")
        assert why in verdict.verdict
    assert judge([below], {}, {"good": "failed: exit status 1"})[0].verdict == "missing (good: failed: exit status 1)"
    assert all(verdict.verdict.startswith("missing") for verdict in judge(AIMS, {a.benchmark: {} for a in AIMS}, {}))


def test_packed_is_held_against_the_best_rival_on_the_worst_mix() -> None:
    speeds = {
        "a": {"loop": 4.0, "padded": 1.0, "bucket": 3.0, "packed": 6.0},
        "b": {"loop": 4, "padded": 5, "bucket": 2, "packed": 4},
    }
    rows = [
        {"mix": mix, "mode": mode, "samples_per_cpu_second": speed}
        for mix, modes in speeds.items()
        for mode, speed in modes.items()
    ]
    assert packed_against(("padded", "bucket"))({"rows": rows}) == 0.8
    assert packed_against(("loop",))({"rows": rows}) == 1.0
    with pytest.raises(LookupError):
        packed_against(("loop",))({"rows": [r for r in rows if r["mode"] != "packed"]})
    with pytest.raises(LookupError, match="2 rows"):
        row(rows, mode="loop")


def test_the_step_written_the_plain_way_has_the_same_loss() -> None:
    objective = build_encoder_objective("vit_nano")
    chunk, whole = make_batch(load_config(["model.name=vit_nano"]), 2, whole=True)
    with torch.no_grad():
        loss = objective.forward_train_batch([chunk], micro_step=0).loss
        torch.testing.assert_close(plain_loss(objective, whole, micro_step=0), loss, rtol=1e-6, atol=0)


def test_an_aim_of_the_encoder_step_reads_what_the_script_measures() -> None:
    found = measure("vit_nano", 1, 1, plain=False)
    aim = Aim("encoder_step", "", encoder("vit_nano", 1, "ratio"), 0.0)
    assert aim.read({"results": [found]}) == found["seconds_per_step"] / found["floor_seconds"]
    assert found["peak_bytes"] >= found["peak_bytes_before_step"] > 0


def test_tables_line_up() -> None:
    assert markdown(["a", "bb"], [["x", "1"], ["yy", "20"]]).splitlines() == [
        "| a   |  bb |",
        "|-----|----:|",
        "| x   |   1 |",
        "| yy  |  20 |",
    ]
    shown = [number(value) for value in (None, 0.0, 1234.5, 0.012345, 1e-12, 2)]
    assert shown == ["\N{EN DASH}", "0", "1,230", "0.0123", "1.0e-12", "2"]


def test_the_floor_of_a_model_is_the_products_of_its_linear_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    calls = recorded_products(model, lambda: model(torch.zeros(2, 4, 3)))
    assert calls == [Product(8, 3, 5), Product(8, 5, 2)]
    assert recorded_products(model, lambda: None) == []
    make_floor(calls)()


def test_kept_bytes_count_a_storage_once_and_no_parameter() -> None:
    layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(8, 4)
    assert saved_bytes(lambda: layer(x), [layer.weight]) == x.nbytes
    assert saved_bytes(lambda: (layer(x), layer(x[:4])), [layer.weight]) == x.nbytes
    assert saved_bytes(lambda: layer(x).exp(), [layer.weight]) == 2 * x.nbytes


def test_a_block_keeps_what_arithmetic_says_for_each_token() -> None:
    found = activations("vit_nano")
    assert found["saved_bytes_per_token_and_layer"] == found["arithmetic_bytes_per_token_and_layer"]
