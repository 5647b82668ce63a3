"""``marey inspect`` of a checkpoint waits for torch and for nothing else of weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.causal_cases import causal_checkpoint
from tests.imported import imported_by

UNUSED = {
    "lightning",
    "torchvision",
    "torch._dynamo",
    "sklearn",
    "scipy",
    "matplotlib",
    "transformers",
    "lance",
    "hydra",
}


@pytest.mark.parametrize("kind", ["encoder", "causal"])
def test_a_checkpoint_is_read_with_torch_alone(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint if kind == "encoder" else causal_checkpoint(tmp_path / "causal.ckpt", "data.train=a.csv")
    modules, said = imported_by(tmp_path, "inspect", str(path))
    assert "20260101-000000-abcdef" in said
    assert "torch" in modules
    assert UNUSED.isdisjoint(modules)
