from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from marey.config.compose import load_config
from marey.config.schema import EncoderConfig
from marey.core.errors import UserError
from marey.training.schedule import check_schedule, lr_at, weight_decay_at

DEFAULTS = {"peak_step": 1200, "start_lr": 1e-4, "lr": 4e-4, "end_lr": 4e-4, "total_steps": 10_244}


@pytest.mark.parametrize(("step", "rate"), [(0, 1e-4), (600, 2.5e-4), (1200, 4e-4), (5000, 4e-4)])
def test_the_default_warms_up_and_stays(step: int, rate: float) -> None:
    assert lr_at(step, **DEFAULTS) == pytest.approx(rate, rel=1e-15)


def test_the_default_is_the_one_the_configuration_holds() -> None:
    config = load_config([])
    scheduler = config.scheduler
    held = (scheduler.peak_step, scheduler.start_lr, config.optimizer.lr, scheduler.end_lr)
    assert held == (1200, 1e-4, 4e-4, 4e-4)


def test_an_end_below_the_peak_is_a_half_cosine() -> None:
    def at(step: int) -> float:
        return lr_at(step, peak_step=10, start_lr=0.0, lr=1.0, end_lr=0.2, total_steps=110)

    assert at(10) == 1.0
    assert at(60) == pytest.approx(0.6)
    assert at(35) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert at(110) == at(500) == 0.2
    assert all(at(step) > at(step + 1) for step in range(10, 110))


def test_no_warmup_starts_at_the_peak() -> None:
    assert lr_at(0, peak_step=0, start_lr=0.5, lr=1.0, end_lr=1.0, total_steps=None) == 1.0


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.22), ("cosine", 0.22)])
def test_weight_decay_goes_from_start_to_end_and_stays(kind: str, middle: float) -> None:
    def at(step: int) -> float:
        return weight_decay_at(step, start_value=0.04, end_value=0.4, total_steps=100, schedule_type=kind)  # type: ignore[arg-type]

    assert at(0) == pytest.approx(0.04)
    assert at(50) == pytest.approx(middle)
    assert at(100) == at(1000) == pytest.approx(0.4)
    quarter = 0.25 if kind == "linear" else 0.5 * (1 - math.cos(math.pi / 4))
    assert at(25) == pytest.approx(0.04 + 0.36 * quarter)


def test_a_decay_without_a_last_step_is_refused(small: Callable[..., EncoderConfig]) -> None:
    check_schedule(small("scheduler.end_lr=1e-5"), total_steps=100)
    with pytest.raises(UserError, match="no last step"):
        check_schedule(small("scheduler.end_lr=1e-5"), total_steps=None)
    with pytest.raises(UserError, match="weight_decay_scheduler"):
        check_schedule(small("weight_decay_scheduler.enabled=true"), total_steps=None)
