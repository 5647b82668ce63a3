"""What commands import before they answer: modules are counted here, seconds are in benchmarks/startup.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marey.training import run, workers
from marey.training.again import Again
from tests.imported import imported_by
from tests.training.conftest import write_store
from tests.training.latent_runs import SMALL, write

LEARNING = {"torch", "torchvision", "lightning", "torchmetrics", "transformers", "tensorboard"}
PICTURES = {"matplotlib", "sklearn", "scipy"}
HEAVY = LEARNING | PICTURES


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["ingest", "--help"]], ids=" ".join)
def test_help_imports_none_of_what_the_commands_use(words: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from marey import cli\n"
        f"try: cli.main({words!r})\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.strip().rpartition("\n")
    assert "usage: marey" in said
    unwanted = HEAVY | {"hydra", "omegaconf", "pydantic", "numpy", "lance", "pyarrow", "pandas", "av", "yaml"}
    assert unwanted.isdisjoint(json.loads(modules.replace("'", '"')))


def test_a_plan_without_data_imports_neither_torch_nor_what_reads_data(tmp_path: Path) -> None:
    modules, said = imported_by(tmp_path, "plan")
    assert "parameters" in said
    assert (HEAVY | {"lance", "pyarrow", "av"}).isdisjoint(modules)


def test_a_plan_counts_a_store_s_episodes_without_torch(tmp_path: Path) -> None:
    write_store(tmp_path / "small.lance", episodes=70)
    words = ["plan", "recipe=demo", "data=custom", "data.train=small.lance", "frame_stride=1"]
    modules, said = imported_by(tmp_path, *words)
    assert "70 episodes x 1 clips" in said
    assert "lance" in modules
    assert HEAVY.isdisjoint(modules)


def test_a_causal_plan_reads_its_manifest_without_torch(tmp_path: Path) -> None:
    write(tmp_path, "one", 12)
    modules, said = imported_by(tmp_path, "plan", "--config-name", "causal_video", *SMALL, "data.train=one.csv")
    assert re.search(r"data +one: [1-9][0-9]* clips", said)
    assert (HEAVY | {"lance", "av"}).isdisjoint(modules)


def test_manifests_import_nothing_of_what_turns_frames_into_latents(tmp_path: Path) -> None:
    script = (
        "import sys; from marey.config.compose import load_run; from marey.training.latents import resolve_data\n"
        "data = load_run(['data.train=a.csv'], config_name='causal_video').data\n"
        "assert resolve_data(data) == data\n"
        "print([name for name in ('torch', 'av', 'lance', 'marey.training.latent_store') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_of_a_run_without_pictures_waits_for_neither_torch_nor_matplotlib() -> None:
    script = "import sys, marey.evaluation.report; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert HEAVY.isdisjoint(json.loads(done.stdout.replace("'", '"')))


@pytest.mark.parametrize("modules", [workers.CLIP_MODULES, workers.LATENT_MODULES], ids=["clips", "latents"])
def test_loader_workers_are_born_with_torch_and_the_reader_and_without_lightning(
    modules: tuple[str, ...], tmp_path: Path
) -> None:
    note = tmp_path / "modules.json"
    inside = f"import json, sys; open({str(note)!r}, 'w').write(json.dumps(sorted(sys.modules)))"
    script = (
        "from marey.training.workers import worker_context\n"
        f"worker = worker_context({modules!r}).Process(target=exec, args=({inside!r},))\n"
        "worker.start(); worker.join(); assert worker.exitcode == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    found = set(json.loads(note.read_text()))
    assert {"torch", *modules} <= found
    assert (PICTURES | {"lightning", "torchmetrics", "tensorboard", "transformers", "hydra"}).isdisjoint(found)


@pytest.mark.parametrize(
    ("overrides", "config_name", "expected"),
    [
        (["recipe=demo", "loader.num_workers=1"], "config", [workers.CLIP_MODULES, "training"]),
        (["data=demo", "loader.num_workers=1"], "causal_video", [workers.LATENT_MODULES, "training"]),
        (["recipe=demo", "loader.num_workers=0"], "config", ["training"]),
    ],
)
def test_what_workers_are_forked_from_starts_before_lightning_is_imported(
    overrides: list[str],
    config_name: str,
    expected: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[Any] = []

    class Fit(SimpleNamespace):
        """Stands where the trainer is imported from, and notes when that is."""

        def __getattr__(self, name: str) -> Any:
            if name != "fit":
                raise AttributeError(name)
            happened.append("training")
            return lambda *_args, **_kwargs: None

    monkeypatch.setitem(sys.modules, "marey.training.fit", Fit())
    monkeypatch.setattr(workers, "worker_context", happened.append)
    run.execute(
        run.compose.load_run(overrides, config_name=config_name),
        run_dir=tmp_path / "run",
        checkpoint_dir=tmp_path / "checkpoints",
        overrides=overrides,
        command=["marey", "train"],
        again=Again(program=["marey", "train"], overrides=overrides, folder=tmp_path, run_dir=tmp_path / "run"),
    )
    assert happened == expected
