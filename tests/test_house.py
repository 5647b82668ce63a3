"""The rooms of the house and the arrows between them: imports point down, and only down."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "marey"
EVERYONE = {"core", "config"}
ALLOWED = {
    "core": set(),
    "config": {"core"},
    "conf": set(),
    "pixels": set(),
    "latents": set(),
    "batching": set(),
    "sampling": {"latents", "pixels"},
    "models": {"batching"},
    "objectives": {"models", "batching"},
    "training": {"objectives", "models", "batching", "sampling", "latents", "pixels"},
    "evaluation": {"objectives", "models", "batching", "latents", "pixels"},
    "story": {"training", "evaluation", "pixels", "latents"},
    "doctor": {"training", "evaluation", "pixels", "latents"},
    "cli": {"training", "evaluation", "pixels", "latents", "story", "doctor"},
    "__main__": {"cli"},
    "__init__": set(),
}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the absolute one"
            names = [node.module or ""]
            if node.module == "marey":
                names = [f"marey.{alias.name}" for alias in node.names if alias.name != "__version__"]
        rooms |= {name.split(".")[1] for name in names if name.startswith("marey.")}
    return rooms


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is not a room of the house"
    foreign = imported_rooms(path) - {room} - (EVERYONE if room not in EVERYONE else set())
    assert foreign <= ALLOWED[room], f"{room} imports {sorted(foreign - ALLOWED[room])}"


def test_lightning_is_imported_by_training_alone() -> None:
    users = {
        room_of(path)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.startswith("lightning") for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"))
    }
    assert users == {"training"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("marey.cli", ["torch", "lightning", "hydra", "lance"]),
        ("marey.training.plan", ["torch", "lightning", "lance"]),
        ("marey.evaluation.inspect", ["torch", "lightning"]),
        ("marey.doctor.examine", ["torch", "lightning", "hydra", "lance", "av", "numpy", "pydantic"]),
        ("marey.pixels.dataset", ["lightning", "hydra"]),
        ("marey.pixels.ingest_worker", ["torch", "lightning", "hydra"]),
    ],
)
def test_what_must_start_fast_imports_nothing_heavy(module: str, absent: list[str]) -> None:
    check = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
