from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from marey import story
from marey.config.causal import CausalConfig
from marey.config.compose import compose_container, validate
from marey.core.errors import UserError
from marey.evaluation.demo_future import PATCH, SIDE, Latents, small_latents
from marey.evaluation.page import page
from marey.latents.manifest import read_manifest
from marey.pixels.digits import encode


def test_training_is_the_command_a_person_would_type(tmp_path: Path):
    words = story.train_words(["data=demo"], run=tmp_path / "r", steps=7, seed=3)
    assert words[:4] == ["train", "recipe=demo", "data=demo", "seed=3"]
    assert "trainer.max_steps=7" in words
    assert not any("max_steps" in word for word in story.train_words([], run=tmp_path, steps=None, seed=0))


def test_the_second_act_is_a_command_too(tmp_path: Path):
    latents = Latents([("data.train", "/a b/m.csv"), ("data.val_fraction", "0.1")], None)
    words = story.predict_words(latents, run=tmp_path / "future", steps=None, seed=3)
    assert words[:5] == ["train", "--config-name", "causal_video", 'data.train="/a b/m.csv"', "data.val_fraction=0.1"]
    assert f"trainer.max_steps={story.PREDICTOR_STEPS}" in words
    assert f"data.epoch_draws={story.PREDICTOR_STEPS * story.PREDICTOR_BATCH}" in words
    assert "trainer.max_steps=2" in story.predict_words(latents, run=tmp_path, steps=2, seed=0)
    config = validate(compose_container(words[3:-2], config_name="causal_video"), CausalConfig)
    assert config.data.batching.mode == "packed"


def test_without_enough_videos_the_future_is_of_a_clip_that_training_saw(tmp_path: Path):
    for count, held_out in ((1, False), (12, True)):
        videos = tmp_path / f"{count}"
        videos.mkdir()
        for i in range(count):
            moving_square(videos / f"c{i}.mp4", i % 3)
        latents = small_latents(str(videos), None, tmp_path / f"latents{count}", say=lambda _: None)
        assert (latents.asked is None) == held_out
        manifest = read_manifest(tmp_path / f"latents{count}" / "train" / "manifest.csv")
        assert len(manifest) == count
        assert manifest.height is not None
        assert manifest.height.tolist() == [SIDE // PATCH] * count


def test_every_call_has_a_run_folder_of_its_own(tmp_path: Path):
    (tmp_path / "run-001").mkdir()
    assert story.new_run_folder(tmp_path).name == "run-002"
    assert story.new_run_folder(tmp_path).name == "run-003"


def test_a_page_that_is_not_ours_is_never_replaced(tmp_path: Path):
    report = story.claim_report(tmp_path / "new" / "out")
    assert report == tmp_path / "new" / "out" / "report.html"
    report.write_text(page(title="t", lede="l", body_html="", footer="f"))
    assert story.claim_report(report.parent) == report
    report.write_text("<html>mine</html>")
    with pytest.raises(UserError, match="not a page of `marey demo`"):
        story.claim_report(report.parent)
    assert report.read_text() == "<html>mine</html>"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        story.claim_report(tmp_path / "file")


def test_lines_are_passed_on_and_kept(tmp_path: Path):
    said: list[str] = []
    script = "import sys; print('one'); print('two', file=sys.stderr)"
    story.stream([sys.executable, "-u", "-c", script], log=tmp_path / "log", say=said.append)
    assert said == ["  one", "  two"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_refusal_of_the_training_is_the_refusal_of_the_demo(tmp_path: Path):
    script = "import sys; print('marey: no such key', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UserError, match=r"^no such key$"):
        story.stream([sys.executable, "-c", script], log=tmp_path / "log", say=lambda _: None)
    with pytest.raises(RuntimeError, match="exit code 1"):
        story.stream([sys.executable, "-c", "1/0"], log=tmp_path / "log", say=lambda _: None)


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_reaches_the_training_once_and_is_waited_for(tmp_path: Path, request_):
    child = (
        "import signal, time\n"
        "asked = []\n"
        "signal.signal(signal.SIGINT, lambda *_: asked.append(1))\n"
        "print('ready', flush=True)\n"
        "while not asked: time.sleep(0.02)\n"
        "time.sleep(0.3); print('saved', len(asked), flush=True)\n"
    )
    parent = (
        "import sys; from pathlib import Path; from marey import story\n"
        f"story.stream([sys.executable, '-c', {child!r}], log=Path({str(tmp_path / 'log')!r}),\n"
        "             say=lambda text: print(text, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(request_)
    out, err = process.communicate(timeout=30)
    assert "saved 1" in out
    assert "KeyboardInterrupt" in err


def moving_square(path: Path, colour: int) -> None:
    frames = np.full((40, 48, 64, 3), 40, np.uint8)
    for t in range(40):
        frames[t, 8 + t // 2 : 20 + t // 2, t : t + 16, colour] = 220
    encode(path, frames, "libx264")


def test_a_persons_own_videos_become_a_page(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    videos, out = tmp_path / "my videos = 1", tmp_path / "out"
    videos.mkdir()
    for colour in range(3):
        moving_square(videos / f"c{colour}.mp4", colour)
    (videos / "broken.mp4").write_bytes(b"no video")
    said: list[str] = []
    started = time.time()
    report = story.demo(out=out, videos=videos, steps=2, seed=1, say=said.append)
    text = report.read_text()
    assert "A video encoder of your own, from 3 of your videos" in text
    assert "What it finds alike" in text
    assert "What it learned" not in text
    assert "What it expects to happen next" in text
    assert list((out / "run-001" / "future" / "rollout").glob("*.mp4"))
    run = out / "run-001"
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert (run / "report.html").read_text() == text
    assert any("broken.mp4" in line for line in said)
    assert any(line.startswith("  page ") for line in said)
    (store,) = out.glob("*.lance")
    assert store.stat().st_mtime >= started - 1


def test_a_store_is_named_by_its_videos_and_not_by_what_lies_beside_them(tmp_path: Path):
    moving_square(tmp_path / "a.mp4", 0)
    first = story._fingerprint(tmp_path)
    (tmp_path / "demo-output").mkdir()
    (tmp_path / "demo-output" / "report.html").write_text("page")
    assert story._fingerprint(tmp_path) == first
    moving_square(tmp_path / "b.mp4", 1)
    assert story._fingerprint(tmp_path) != first
