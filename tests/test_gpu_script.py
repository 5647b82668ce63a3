"""The script that a GPU will run, rehearsed on the CPU: every kind of row, and what becomes of rows that break."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import gpu  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_runs  # noqa: E402
import gpu_timings  # noqa: E402
from gpu_rows import FAILED, Found, Place, Row, run_row, run_rows, within, worst  # noqa: E402

CPU = Place(torch.device("cpu"), small=True)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def first_of_each_kind(rows):
    """One row for every function: what differs between rows of one function is an argument."""
    kinds = {getattr(row.work, "func", row.work): row for row in reversed(rows)}
    return sorted(kinds.values(), key=rows.index)


# Whole runs are left to ``gpu.py --rehearse``: tests/training/test_verify.py restores the same kinds at every step.
REHEARSED = first_of_each_kind([row for row in gpu.ROWS if row.on_cpu and row not in gpu_runs.RUNS])


@pytest.mark.parametrize("row", REHEARSED, ids=lambda row: row.name)
def test_every_kind_of_row_runs_on_a_cpu_as_small_as_it_goes(row):
    with warnings.catch_warnings():
        # What one library says of another, outside of the run itself.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        result = run_row(row, CPU, seconds=600)
    assert result.status in ("PASS", "MEASURED"), (result.said, result.numbers)
    assert result.numbers


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_runs_that_are_resumed_are_valid_and_deterministic(tmp_path, device):
    place = Place(torch.device(device), small=device == "cpu")
    for configure in (gpu_runs.encoder_run, gpu_runs.causal_run):
        config = configure(tmp_path, place)
        assert config.trainer.deterministic is True
        assert config.trainer.accelerator == {"cpu": "cpu", "cuda": "gpu"}[device]
        assert config.accumulate_grad_batches == 2


def test_the_configurations_at_full_size_are_valid_too():
    on_cuda = Place(torch.device("cuda"), small=False)
    sizes = {
        name: gpu_timings.full_config(on_cuda, f"model.name={name}").model.name for name in ("vit_tiny", "vit_base")
    }
    assert sizes == {"vit_tiny": "vit_tiny", "vit_base": "vit_base"}
    assert gpu_timings.tiny_config(on_cuda).loader.batch_size == 128
    assert gpu_timings.loader_config(on_cuda, Path("frames.lance"), workers=15).loader.num_workers == 15
    assert gpu_checks.encoder_config(on_cuda, "model.attn_mode=full").model.name == "vit_small"


def test_rows_that_need_cuda_say_so_in_a_rehearsal():
    waiting = [row for row in gpu.ROWS if not row.on_cpu]
    assert waiting
    assert {run_row(row, CPU, seconds=1).said for row in waiting} == {"needs CUDA"}


def test_budgets_fit_the_limit_of_one_command():
    # Rows seldom use their budgets up; the checks' alone must leave no doubt.
    assert gpu.LIMIT_S <= 480
    assert len({row.name for row in gpu.ROWS}) == len(gpu.ROWS)


def sleepy(place):
    time.sleep(5)
    return Found({})


def broken(place):
    raise RuntimeError("the kernel\nfell over")


def without_a_package(place):
    raise ModuleNotFoundError("No module named 'lance'", name="lance")


def test_one_row_that_fails_does_not_stop_the_others():
    rows = [
        Row("breaks", broken, 5),
        Row("is late", sleepy, 0.02),
        Row("lacks a package", without_a_package, 5),
        Row("is wrong", lambda place: within({"error": float("nan")}, 1.0), 5),
        Row("is right", lambda place: within({"error": 0.5}, 1.0), 5),
        Row("is measured", lambda place: Found({"s": 1.0}), 5, check=False),
    ]
    results = run_rows(rows, CPU, limit=60, show=lambda result: None)
    assert [r.status for r in results] == ["ERROR", "LATE", "ABSENT", "FAIL", "PASS", "MEASURED"]
    assert "the kernel fell over" in results[0].said
    assert results[2].said == "needs the package lance"
    assert [r.row.name for r in gpu.failed(results)] == ["breaks", "is late", "is wrong"]


def test_rows_beyond_the_time_of_all_are_late_at_once():
    (result,) = run_rows([Row("any", sleepy, 5)], CPU, limit=0, show=lambda result: None)
    assert result.status == "LATE"
    assert result.seconds < 1


def test_a_difference_that_is_no_number_is_no_pass():
    assert worst(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert not within({"error": worst(torch.tensor([float("nan")]), torch.ones(1))}, 1.0).passed


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sigreg", lambda x: x * 1.001),
        ("normalising", lambda x: x + 1e-6),
    ],
)
def test_a_wrong_device_fails_its_check(monkeypatch, name, wrong):
    """The device's side is bent a little, the reference's is not."""
    if name == "sigreg":
        original = gpu_checks.SigReg.forward
        monkeypatch.setattr(
            gpu_checks.SigReg,
            "forward",
            lambda self, z, *, micro_step: (
                wrong(original(self, z, micro_step=micro_step))
                if z.dtype == torch.float32
                else original(self, z, micro_step=micro_step)
            ),
        )
    else:
        calls = []
        normalize = gpu_checks.normalize_patches

        def every_second(patches, *, dtype):
            calls.append(dtype)
            out = normalize(patches, dtype=dtype)
            return wrong(out) if len(calls) % 2 == 0 else out

        monkeypatch.setattr(gpu_checks, "normalize_patches", every_second)
    assert getattr(gpu_checks, name)(CPU).passed is False


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "normalising", "--only", "compilations", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| PASS | normalising on the device" in printed
    assert "| NEEDS CUDA | attention: compilations" in printed
    written = json.loads(path.read_text())
    assert [row["status"] for row in written["rows"]] == ["NEEDS CUDA", "PASS"]
    assert written["machine"]["torch"] == torch.__version__.partition("+")[0]


def test_a_failed_check_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ROWS", [Row("wrong", lambda place: within({"error": 2.0}, 1.0), 5)])
    assert gpu.main(["--rehearse"]) == 1
    assert "FAIL: wrong" in capsys.readouterr().out
    assert "FAIL" in FAILED


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the sentence says is missing")
def test_without_a_cuda_device_it_is_one_sentence_and_exit_code_2(capsys):
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--rehearse" in said
