from __future__ import annotations

import pytest
import torch
from torch import nn

from marey.config.compose import load_config
from marey.config.schema import EmaConfig
from marey.core.errors import UserError
from marey.training.ema import Ema, describe_rule, effective_decay


def rule(**changes: object) -> EmaConfig:
    values = {
        "enabled": True,
        "decay": 0.9,
        "update_every": 4,
        "start_step": 0,
        "compensate": True,
        "include": ["encoder"],
        "save_key": "state_dict_ema",
        "dtype": "float64",
    }
    return EmaConfig(**{**values, **changes})  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.BatchNorm1d(3).double()
        self.projector = nn.Linear(3, 3)

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.encoder.weight.fill_(value)
            self.encoder.running_mean.fill_(10 * value)  # type: ignore[union-attr]
            self.encoder.num_batches_tracked.fill_(int(value))  # type: ignore[union-attr]


@pytest.mark.parametrize(("compensate", "decay"), [(True, 0.9**4), (False, 0.9)])
def test_after_n_updates_it_is_the_closed_form(compensate: bool, decay: float) -> None:
    model = Model()
    model.set(5.0)
    ema = Ema(model, rule(compensate=compensate))
    values = [float(step) ** 1.5 for step in range(1, 31)]
    for step, value in enumerate(values, start=1):
        model.set(value)
        assert ema.after_step(model, step) is (step % 4 == 0)
    seen = values[3::4]
    n = len(seen)
    expected = decay**n * 5.0 + sum((1 - decay) * decay ** (n - 1 - i) * value for i, value in enumerate(seen))
    assert ema.updates == n == 7
    torch.testing.assert_close(
        ema.copy["encoder.weight"], torch.full((3,), expected, dtype=torch.float64), rtol=1e-13, atol=0
    )
    torch.testing.assert_close(
        ema.copy["encoder.running_mean"], torch.full((3,), 10 * expected, dtype=torch.float64), rtol=1e-13, atol=0
    )
    assert int(ema.copy["encoder.num_batches_tracked"]) == int(seen[-1])


def test_it_copies_the_named_modules_alone() -> None:
    assert {name.partition(".")[0] for name in Ema(Model(), rule()).state_dict()} == {"encoder"}
    with pytest.raises(UserError, match="choose from encoder, projector"):
        Ema(Model(), rule(include=["enocder"]))


def test_before_its_start_it_is_the_weights_themselves_and_counts_from_there() -> None:
    model = Model()
    ema = Ema(model, rule(start_step=6, decay=0.5, update_every=2, compensate=False))
    updated = []
    for step in range(1, 12):
        model.set(float(step))
        if ema.after_step(model, step):
            updated.append(step)
        if step <= 6:
            assert float(ema.copy["encoder.weight"][0]) == step
    assert updated == [8, 10]
    assert float(ema.copy["encoder.weight"][0]) == 0.5 * (0.5 * 6 + 0.5 * 8) + 0.5 * 10


def test_half_precision_weights_are_averaged_in_float32() -> None:
    model = Model()
    model.encoder.to(torch.bfloat16)
    ema = Ema(model, rule(dtype="float32", decay=0.999, update_every=1))
    assert ema.copy["encoder.weight"].dtype == torch.float32
    model.set(2.0)
    ema.after_step(model, 1)
    torch.testing.assert_close(ema.copy["encoder.weight"], torch.full((3,), 1.001))


def test_it_goes_on_from_a_saved_state() -> None:
    model, other = Model(), Model()
    whole, first = Ema(model, rule()), Ema(other, rule())
    for step in range(1, 9):
        model.set(float(step))
        whole.after_step(model, step)
        if step <= 5:
            first.after_step(model, step)
    second = Ema(Model(), rule())
    second.load(first.state_dict(), updates=first.updates)
    for step in range(6, 9):
        model.set(float(step))
        second.after_step(model, step)
    assert second.updates == whole.updates == 2
    assert all(torch.equal(whole.copy[name], second.copy[name]) for name in whole.copy)


def test_another_models_average_is_refused_by_name() -> None:
    ema = Ema(Model(), rule())
    with pytest.raises(UserError, match=r"encoder\.extra"):
        ema.load({**ema.state_dict(), "encoder.extra": torch.zeros(1)}, updates=1)
    with pytest.raises(UserError, match=r"encoder\.weight has shape \[4\]"):
        ema.load({**ema.state_dict(), "encoder.weight": torch.zeros(4)}, updates=1)


@pytest.mark.parametrize("key", ["state_dict", "optimizer_states", "loops", "marey", "''"])
def test_the_average_takes_no_other_entrys_place_in_a_checkpoint(key: str) -> None:
    with pytest.raises(UserError, match=r"ema\.save_key="):
        load_config(["recipe=smoke", f"ema.save_key={key}"])


def test_the_rule_is_said_in_a_sentence() -> None:
    assert effective_decay(rule(decay=0.9999, update_every=32)) == pytest.approx(0.9968049, abs=1e-7)
    assert "0.9999 ** 32" in describe_rule(rule(decay=0.9999, update_every=32))
    assert "plain rule" in describe_rule(rule(compensate=False))
    assert describe_rule(rule(enabled=False)).startswith("off")
