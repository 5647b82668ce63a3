"""Every kind of run, restored at every step, goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marey.config.schema import EncoderConfig
from marey.training.averaging import Averaging
from marey.training.module import TrainingModule
from marey.training.verify import assert_resumes_exactly, tree_differences

from .latent_runs import load, mixture, one_source, write

Configure = Callable[..., EncoderConfig]
# 24 clips: 6 micro-steps and 3 optimizer steps an epoch, so 5 steps cross the end of one.
RUN = (
    "trainer.max_steps=5",
    "accumulate_grad_batches=2",
    "trainer.log_every_n_steps=2",
    "ema.update_every=2",
    "scheduler.end_lr=1e-5",
    "weight_decay_scheduler={enabled: true, schedule_type: cosine, start_value: 0.0, end_value: 0.4}",
)
CAUSAL = (
    "accumulate_grad_batches=2",
    "trainer.max_epochs=-1",
    "trainer.max_steps=5",
    "trainer.log_every_n_steps=2",
    "ema.enabled=true",
    "ema.update_every=2",
)


def test_the_encoder_across_the_end_of_an_epoch_with_validation(small: Configure, tmp_path: Path) -> None:
    done = assert_resumes_exactly(small(*RUN, "trainer.limit_val_batches=1"), tmp_path)
    assert done.steps == 5
    assert (done.again / "validation.csv").read_text().count("\n") == 3


def test_the_encoder_in_float64_with_another_number_of_workers(small: Configure, tmp_path: Path) -> None:
    exact = (*RUN, "trainer.max_steps=4", "trainer.precision=64-true", "ema.dtype=float64", "loader.micro_batch_size=2")
    workers = ("loader.num_workers=2", "loader.persistent_workers=false")
    done = assert_resumes_exactly(small(*exact), tmp_path, resumed=small(*exact, *workers))
    content = torch.load(done.again / "checkpoints" / "4.ckpt", weights_only=True)
    assert content["state_dict"]["encoder.norm.weight"].dtype == torch.float64


def test_steps_that_are_skipped(small: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TrainingModule._forward

    def forward(module: TrainingModule, batch: Any, *, micro_step: int) -> Any:
        output = original(module, batch, micro_step=micro_step)
        return output._replace(loss=output.loss * float("nan")) if micro_step in (2, 5, 6) else output

    monkeypatch.setattr(TrainingModule, "_forward", forward)
    assert_resumes_exactly(small(*RUN, "on_nonfinite=skip", "max_skipped_in_a_row=3"), tmp_path)


@pytest.mark.parametrize("mode", ["strict", "padded", "bucket", "packed"])
def test_prefix_suffix_in_every_mode(tmp_path: Path, mode: str) -> None:
    batch = 1 if mode == "strict" else 3
    source = one_source(tmp_path) if mode in ("strict", "bucket") else mixture(tmp_path)
    config = (*source, *CAUSAL, f"data.batching.mode={mode}", f"data.train_batch_size={batch}")
    workers = (*config, "loader.num_workers=2") if mode in ("bucket", "packed") else config
    assert_resumes_exactly(load(*config), tmp_path / "runs", resumed=load(*workers))


def test_chunked_conditioned(tmp_path: Path) -> None:
    path = write(tmp_path, "long", 30, lengths=(9, 12))
    config = (f"data.train={path}", *CAUSAL, "program.name=chunked_conditioned", "data.batching.mode=strict")
    config = (*config, "data.train_batch_size=1")
    assert_resumes_exactly(load(*config), tmp_path, resumed=load(*config, "loader.num_workers=2"))


def test_what_is_not_restored_is_found_and_named(
    small: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Averaging, "on_load_checkpoint", lambda *_: None)
    with pytest.raises(AssertionError, match=r"restored at step 1 of 3, .* 2\.ckpt\.state_dict_ema\.encoder"):
        assert_resumes_exactly(small(*RUN, "trainer.max_steps=3"), tmp_path)


def test_trees_are_compared_by_their_bits() -> None:
    zero, tree = torch.zeros(2), {"a": [torch.tensor([float("nan"), 1.0]), 2], "b": float("nan")}
    assert list(tree_differences(tree, tree)) == []
    assert list(tree_differences({"x": zero}, {"x": -zero})) == [".x"]
    assert list(tree_differences({"x": zero}, {"x": zero.double()})) == [".x"]
    assert list(tree_differences({"x": [1, 2]}, {"x": [1, 3], "y": 0})) == [".y: in one alone", ".x[1]: 2 != 3"]
