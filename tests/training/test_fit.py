from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from marey.core.errors import UserError

from .conftest import Finished

Train = Callable[..., Finished]


def test_a_run_leaves_a_checkpoint_with_both_sets_of_weights(train: Train) -> None:
    done = train("run", "trainer.max_steps=3", "checkpoint.every_n_train_steps=2")
    names = sorted(path.name for path in done.checkpoints.iterdir())
    assert names == ["epoch-0000-step-0000002.ckpt", "epoch-0000-step-0000003.ckpt", "last.ckpt"]
    assert done.newest == done.checkpoints / names[1]
    content = done.checkpoint()
    assert {key.partition(".")[0] for key in content["state_dict"]} == {"encoder", "projector"}
    assert {key.partition(".")[0] for key in content["state_dict_ema"]} == {"encoder"}
    assert content["marey"]["step"] == 3
    assert content["marey"]["ema"]["updates"] == 1
    receipt = json.loads((done.folder / "receipt.json").read_text())
    assert receipt["status"] == "finished"
    assert receipt["consumed"]["clips"] == 12
