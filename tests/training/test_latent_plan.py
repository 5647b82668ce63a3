"""`marey plan` on causal runs: what it counts is what a run does, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from marey.config.compose import compose_container
from marey.core.errors import UserError
from marey.latents.make_config import make_config
from marey.training.plan import plan_text

from .latent_runs import SMALL, one_source, write


def text_of(*overrides: str) -> str:
    return plan_text([*SMALL, *overrides], config_name="causal_video")


def test_it_shows_buckets_padding_by_mode_cost_and_steps(tmp_path: Path) -> None:
    said = text_of(*one_source(tmp_path), "data.batching.mode=packed", "data.train_batch_size=4")
    assert "buckets          1+2 " in said
    assert "packed: 0% padding (this run)" in said
    assert "padded: " in said
    assert "of attention useful" in said
    assert "strict: refuses unequal lengths" in said
    assert "video tokens seen per optimizer step" in said
    assert "TFLOP per optimizer step" in said
    assert "  exposure       a: 100.0% of the draws asked" in said
    assert "effective batch       4 samples  (1 rank x 4 samples x 1 accumulated" in said


def test_bucket_pads_less_than_padded(tmp_path: Path) -> None:
    lines = text_of(*one_source(tmp_path), "data.train_batch_size=4").splitlines()
    shares = {
        name: float(line.split(f"{name}: ")[1].split("%")[0])
        for line in lines
        for name in ("padded", "bucket")
        if f"{name}: " in line and "padding" in line
    }
    assert 0 < shares["bucket"] < shares["padded"]


def test_several_ranks_show_their_balance(tmp_path: Path) -> None:
    said = text_of(*one_source(tmp_path), "trainer.devices=2", "data.batching.mode=packed")
    assert "ranks            2: the mean rank has " in said


def test_a_made_configuration_forecasts_repeats_and_shares(tmp_path: Path) -> None:
    first, second = write(tmp_path, "one", 60), write(tmp_path, "second", 40, canvases=((4, 8),))
    out = tmp_path / "run.yaml"
    make_config([first, second], out, defaults=compose_container(["data=demo"], config_name="causal_video"))
    said = plan_text(["data.buckets=[[1,2],[1,4],[2,6]]"], config_name="run", config_dir=tmp_path)
    assert "36 samples x 1 accumulated" in said
    assert "tail repeats" in said
    assert "canvases         4x4 " in said
    assert "  exposure       one: " in said
    assert "  exposure       second: " in said


def test_what_is_not_here_yet_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAREY_CACHE", str(tmp_path))
    assert "the embedded set, made and encoded on first use" in plan_text(["data=demo"], config_name="causal_video")
    assert "holds frames, encoded when training starts" in text_of("data.train=x.lance")
    with pytest.raises(UserError, match="does not fill one optimizer step"):
        text_of(*one_source(tmp_path), "data.train_batch_size=500")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    overrides = [*SMALL, *one_source(tmp_path)]
    check = (
        f"import sys; from marey.training.plan import plan_text; plan_text({overrides!r}, config_name='causal_video'); "
        "print([name for name in ('torch', 'lightning', 'lance') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
