"""`marey plan` on causal runs: what it counts is what a run does, without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from marey.config.compose import compose_container
from marey.core.errors import UserError
from marey.latents.make_config import make_config
from marey.sampling.latent_stream import read_sources, train_stream
from marey.training.plan import plan_text

from .latent_runs import SMALL, load, one_source, write


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


def planned(said: str, source: str) -> tuple[int, float, int, int]:
    """(samples, times each window, repeats, tail repeats) that a plan promises of a source."""
    found = re.search(
        rf"exposure       {source}: .*?, ([\d,]+) samples in all, each window ([\d.]+) times "
        r"\(([\d,]+) repeats, ([\d,]+) tail repeats\)",
        said,
    )
    assert found is not None, said
    samples, times, repeats, tail = (word.replace(",", "") for word in found.groups())
    return int(samples), float(times), int(repeats), int(tail)


def test_exposure_is_that_of_the_plan_and_its_repeats(tmp_path: Path) -> None:
    write(tmp_path, "a", 24, lengths=(8,))
    write(tmp_path, "b", 16, lengths=(8,))
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    words = [
        f"data.sources=[{{name: a, manifest: {a}, weight: 3}}, {{name: b, manifest: {b}}}]",
        f"data.val={a}",
        "data.buckets=[[2,6]]",
        "data.weights=by_draw",
        "data.epoch_draws=50",
        "data.train_batch_size=4",
        "data.batching.drop_last_train=false",
        "trainer.max_epochs=1",
    ]
    said = text_of(*words)
    config = load(*words)
    stream, _ = train_stream(config, read_sources(config.data).train, world=1)
    seen = [r for m in range(stream.planner.micro_steps(0)) for r in stream.requests(0, m, 0)]
    assert len(seen) == 52
    for name, windows in (("a", 24), ("b", 16)):
        mine = [request for request in seen if request.source == name]
        tail = sum(request.repeat > 0 for request in mine)
        expected = (len(mine), round(len(mine) / windows, 2), max(0, len(mine) - tail - windows), tail)
        assert planned(said, name) == expected


def verdict(*overrides: str) -> str:
    return next(line for line in text_of(*overrides).splitlines() if line.startswith("this machine"))


def test_what_training_would_refuse_the_plan_does_not_approve(tmp_path: Path) -> None:
    source = one_source(tmp_path)
    assert verdict(*source) == "this machine     can run it as asked"
    tight = (*source, "data.batching.mode=packed", "data.batching.max_tokens=8")
    assert "alone has" in verdict(*tight)
    strict = (*source, "data.batching.mode=strict")
    assert "set data.train_batch_size=1" in verdict(*strict, "data.train_batch_size=4")
    assert verdict(*strict, "data.train_batch_size=1") == "this machine     can run it as asked"
    held_out = (*strict, "data.train_batch_size=1", "data.val_batch_size=4", "trainer.limit_val_batches=4")
    assert "set data.val_batch_size=1" in verdict(*held_out)
    other = write(tmp_path, "other", 8, channels=5)
    both = f"data.sources=[{{name: a, manifest: {tmp_path / 'a.csv'}}}, {{name: other, manifest: {other}}}]"
    assert "other has latents of 5 channels, not 3" in verdict(both)


def test_damaged_files_are_one_sentence_of_the_plan(tmp_path: Path) -> None:
    source = one_source(tmp_path)
    (tmp_path / "codec.json").write_text('{"format": 1, "na')
    assert "codec.json is not a readable codec record" in verdict(*source)
    (tmp_path / "codec.json").unlink()
    for name, content in (("x.safetensors", b"\x10\0\0\0\0\0\0\0not json at all!!"), ("x.npy", b"junkjunk")):
        (tmp_path / name).write_bytes(content)
        rows = [f"{name}{i},{name},8,4,4" for i in range(40)]
        path = tmp_path / "bad.csv"
        path.write_text("clip_id,path,length_frames,height,width\n" + "\n".join(rows) + "\n")
        assert "its header cannot be read" in verdict(f"data.train={path}")
