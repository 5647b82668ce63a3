from __future__ import annotations

import copy
import fcntl
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from marey import cli
from marey.config.compose import compose_container, load_config
from marey.config.schema import describe
from marey.core.errors import UserError
from marey.evaluation import report_pictures, run_state
from marey.evaluation.report import NAME, report
from marey.evaluation.run_state import newest_checkpoint, read_probes, state, state_words, tidy_receipt
from marey.training.lock import NAME as LOCK
from tests.evaluation.causal_cases import causal_checkpoint, encoded
from tests.evaluation.coloured_source import ColouredSource
from tests.evaluation.conftest import SMALL
from tests.evaluation.test_page import read

COLUMNS = (
    "step,epoch,wall_seconds,train/loss,train/invariance,train/sigreg,train/embedding_rank,train/embedding_std,"
    "lr,clips_per_second,tokens_per_second,padding_share,data_wait_seconds,skipped_steps,clips_seen"
)


def metrics(rows: int, *, rank: float = 6.5) -> str:
    lines = [COLUMNS]
    lines += [
        f"{i},0,{i * 0.5},{1 / i},{0.5 / i},{9 / i},{rank},0.4,0.001,16.0,900.0,0.0,{0.05},0,{8 * i}"
        for i in range(1, rows + 1)
    ]
    return "\n".join(lines) + "\n"


def receipt(**changes: Any) -> dict[str, Any]:
    attempt = {"number": 1, "started": "2026-01-01T00:00:00+00:00", "status": "finished", "from_step": 0, "to_step": 40}
    return {
        "format": 1,
        "kind": "encoder",
        "run_id": "20260101-000000-abcdef",
        "status": "finished",
        "how_it_ended": "finished after 40 optimizer steps",
        "started": "2026-01-01T00:00:00+00:00",
        "updated": "2026-01-01T00:10:00+00:00",
        "attempts": [attempt],
        "host": {"name": platform.node(), "cpu": "a CPU", "cpu_count": 2, "gpus": []},
        "code": {"version": "0.1.0"},
        "recipe": {"name": "smoke", "source": "ours"},
        "batch": {"effective_batch": 8, "statistic_batch": 8, "norm_group": 8, "world_size": 1},
        "steps": {"total_steps": 40},
        "consumed": {
            "optimizer_steps": 40,
            "clips": 320,
            "epochs": 1.5,
            "per_source": [
                {"name": "walks", "clips": 240, "frames": 960, "tokens": 5000, "replaced": 2},
                {"name": "runs", "clips": 80, "frames": 320, "tokens": 1000, "replaced": 0},
            ],
        },
        "data": {"name": "walks", "train": [{"name": "walks", "path": "/nowhere"}], "val": None},
        "differences_from_published_code": [{"what": "noise", "published": "a", "here": "b", "restore": "noise=a"}],
        "checkpoints": [],
        "config": describe(load_config(SMALL)),
        **changes,
    }


def write_run(folder: Path, *, table: str | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.csv").write_text(metrics(40) if table is None else table)
    (folder / "receipt.json").write_text(json.dumps(receipt(**changes)))
    return folder


def made(run: Path, **options: Any) -> str:
    page = report(run, say=lambda _: None, **options).read_text()
    reader = read(page)
    assert reader.silent == []
    assert all(load.startswith(("data:image/", "#")) for load in reader.loads)
    assert "script" not in reader.tags
    assert not re.search(r"https?://", page)
    return page


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ColouredSource:
    found = ColouredSource([0, 1, 2] * 4)
    monkeypatch.setattr(report_pictures, "open_clips", lambda _path, _preprocessing: found)
    return found


def test_an_encoder_run_becomes_a_page_of_its_own(tmp_path, checkpoint, source):
    run = write_run(
        tmp_path / "run",
        checkpoints=[{"path": str(checkpoint), "step": 40}],
        data={
            "name": "walks",
            "train": [{"path": "/nowhere"}],
            "val": [{"path": str(tmp_path)}],
            "val_is_train": False,
        },
    )
    page = made(run, clips=6)
    assert (run / NAME).read_text() == page
    for words in ("smoke on walks: finished after 40 steps", "trained on 320 clips of walks, runs in 20s"):
        assert words in page
    for heading in ("Training", "Speed", "What it saw", "A look inside", "What it finds alike", "The receipt"):
        assert f">{heading}<" in page
    assert "75.0%" in page  # 240 of 320 clips
    assert "the run&#x27;s validation data" in page
    assert "10% waiting for data" in page  # 40 times .05 s of 20 s
    assert "noise=a" in page
    assert "Stops and resumes" not in page
    assert "No pictures" not in page


def test_pictures_may_be_of_other_clips(tmp_path, checkpoint, source):
    run = write_run(tmp_path / "run", checkpoints=[{"path": str(checkpoint)}])
    assert "No pictures: the run&#x27;s own data is no longer there (/nowhere)" in made(run)
    page = made(run, data="elsewhere", clips=4)
    assert "A look inside" in page
    assert "4 of /data, were drawn" in page


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    said: list[str] = []
    report(run, say=said.append)
    assert any("no checkpoint" in line for line in said)
    assert "No pictures: the run has no checkpoint yet" in (run / NAME).read_text()
    with pytest.raises(UserError, match="has no checkpoint"):
        report(run, data="demo:heldout", say=said.append)


def test_a_run_that_logged_nothing_yet_has_a_page(tmp_path):
    run = write_run(tmp_path / "run", table="step,train/loss\n", consumed={}, status="running", how_it_ended="")
    page = made(run)
    assert "no step" in page
    assert "No curves" in page
    (run / "metrics.csv").unlink()
    assert "No curves" in made(run)


def test_a_damaged_checkpoint_is_said_and_does_not_end_the_report(tmp_path):
    (tmp_path / "broken.ckpt").write_bytes(b"not a checkpoint")
    run = write_run(tmp_path / "run", checkpoints=[{"path": str(tmp_path / "broken.ckpt")}])
    assert "No pictures:" in made(run)
    with pytest.raises(UserError):
        report(run, data="demo:heldout", say=lambda _: None)


def test_running_killed_and_elsewhere_are_told_apart(tmp_path):
    assert run_state.LOCK == LOCK
    running = {"status": "running", "updated": "2026-01-01T00:10:00+00:00", "host": {"name": platform.node()}}
    assert state(running, tmp_path) == "unknown"
    (tmp_path / LOCK).touch()
    assert state(running, tmp_path) == "killed"
    assert "left no word after 2026-01-01 00:10 UTC" in state_words(running, tmp_path)
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert state(running, tmp_path) == "running"
    assert state({**running, "host": {"name": "another"}}, tmp_path) == "unknown"
    assert state({"status": "stopped on request"}, tmp_path) == "stopped on request"


def test_a_killed_run_is_titled_as_one(tmp_path):
    run = write_run(tmp_path / "run", status="running", how_it_ended="", steps={"total_steps": 90})
    (run / LOCK).touch()
    page = made(run)
    assert "smoke on walks: killed after 40 of 90 steps" in page
    assert "it was killed, or the machine failed" in page


def test_stops_and_resumes_are_listed_and_marked_in_the_curves(tmp_path):
    first = {"number": 1, "started": "2026-01-01T00:00:00+00:00", "status": "killed", "from_step": 0, "to_step": 20}
    attempts = [first, {**first, "number": 2, "from_step": 20, "to_step": 40, "how_it_ended": "finished <well>"}]
    resumed = {"path": "/a/last.ckpt", "step": 20, "exact": True}
    page = made(write_run(tmp_path / "run", attempts=attempts, resumed_from=resumed))
    assert "Stops and resumes" in page
    assert "2 sittings" in page
    assert "finished &lt;well&gt;" in page
    assert "went on from /a/last.ckpt, step 20, exactly" in page
    assert page.count('class="mark-line"') >= 5


def test_very_long_curves_are_thinned_and_keep_their_spikes(tmp_path):
    lines = metrics(20_000).splitlines()
    lines[10_001] = lines[10_001].replace(f",{1 / 10_001},", ",777.0,")
    page = made(write_run(tmp_path / "run", table="\n".join(lines) + "\n"))
    assert len(page) < 600_000
    assert "20,000 logged rows" in page
    assert ">800<" in page  # the axis reaches the spike
    assert page.count('class="band"') >= 4


def test_a_collapse_is_named(tmp_path):
    assert "the encoder collapsed" in made(write_run(tmp_path / "run", table=metrics(40, rank=1.1)))
    assert "the encoder collapsed" not in made(write_run(tmp_path / "run"))


def test_a_loss_that_is_not_finite_leaves_a_gap(tmp_path):
    table = metrics(40).replace(f",{1 / 20},", ",nan,").replace(f",{1 / 21},", ",inf,")
    assert 'aria-label="The loss on training data.: loss from 1 to 0.025"' in made(
        write_run(tmp_path / "run", table=table)
    )


HOSTILE = "</style><script>alert(1)</script>'\"&"


def test_names_are_text_and_never_markup(tmp_path):
    content = receipt()

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoiled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoiled(item) for item in value]
        return HOSTILE if isinstance(value, str) and value != "encoder" else value

    changes = {key: spoiled(copy.deepcopy(value)) for key, value in content.items() if key != "config"}
    changes["config"] = {**content["config"], "data": spoiled(content["config"]["data"])}
    run = write_run(tmp_path / "run", **changes)
    table = metrics(40).replace("train/sigreg", "train/<script>x</script>").replace("clips_per", "<b>_per")
    (run / "metrics.csv").write_text(table)
    (run / "probe.json").write_text(json.dumps([probe(label=HOSTILE, name=HOSTILE)]))
    page = made(run)
    assert "<script" not in page
    assert "alert(1)" in page


def test_parts_of_an_unexpected_shape_are_left_out(tmp_path):
    content = receipt(config={"recipe": {"name": "smoke"}})
    for key in content:
        for value in ("x", [1] if isinstance(content[key], dict) else {"x": 1}):
            report(write_run(tmp_path / "run", table=metrics(2), **{**content, key: value}), say=lambda _: None)
    for section in ("data", "model", "recipe"):
        report(write_run(tmp_path / "run", table=metrics(2), config={section: "x"}), say=lambda _: None)


def probe(*, label: str = "digit", name: str = "pretrained") -> dict[str, Any]:
    score = {"right": 60, "videos": 100, "low": 0.5, "high": 0.69}
    return {
        "label": label,
        "classes": ["0", "1"],
        "test_videos": 100,
        "chance": {**score, "right": 10},
        "encoders": {name: {"knn": score, "linear": {**score, "right": 80}, "linear_strength": 0.1}},
    }


def test_probes_beside_the_run_are_shown(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "probe.json").write_text(json.dumps([probe()]))
    (run / "probe-motion.json").write_text(json.dumps({**probe(label="motion"), "checkpoint": "x"}))
    (run / "probe-broken.json").write_text("{")
    (run / "probe-other.json").write_text('{"a": 1}')
    found, notes = read_probes(run)
    assert [item["label"] for item in found] == ["motion", "digit"]
    assert len(notes) == 2
    page = made(run)
    assert "80.0%" in page
    assert "Motion: 2 classes, accuracy on 100 held-out videos" in page
    assert "probe-broken.json is not readable JSON" in page


def test_the_newest_checkpoint_is_found_where_the_folder_was_moved(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    entries = [{"path": "/gone/a.ckpt"}, {"path": "/gone/b.ckpt"}, {"path": "/gone/c.ckpt", "removed": True}]
    about = {"checkpoints": entries, "checkpoint_dir": "/gone"}
    assert newest_checkpoint(about, run) is None
    for name in ("a.ckpt", "c.ckpt", "b.ckpt"):
        (run / "checkpoints" / name).touch()
    assert newest_checkpoint(about, run) == run / "checkpoints" / "b.ckpt"
    shutil.rmtree(run / "checkpoints")
    (run / "last.ckpt").touch()
    assert newest_checkpoint(about, run) == run / "last.ckpt"


def test_a_causal_run_shows_its_futures_side_by_side(tmp_path):
    manifest = encoded(tmp_path / "latents")
    checkpoint = causal_checkpoint(tmp_path / "last.ckpt", f"data.train={manifest}")
    run = write_run(
        tmp_path / "run",
        table="step,wall_seconds,train/loss,train/flow,lr,samples_per_second,padding_share\n1,1,2,2,0.1,3,0.2\n2,2,1,1,0.1,3,0.3\n",
        kind="causal",
        checkpoints=[{"path": str(checkpoint)}],
        config=compose_container([], config_name="causal_video"),
        data={"name": "demo", "train": []},
    )
    page = made(run, clips=2)
    assert "What it expects to happen next" in page
    assert page.count("data:image/gif;base64,") == 2
    assert "mean over 2 clips" in page
    assert "held out from training" in page
    assert "A causal predictor of latent video" in page
    assert page.count("Flow matching") == 0  # the loss itself, under another name


def test_a_place_that_is_not_ours_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    other = tmp_path / "mine.html"
    other.write_text("<html>mine</html>")
    with pytest.raises(UserError, match="is not a page of Marey"):
        report(run, out=other, say=lambda _: None)
    assert other.read_text() == "<html>mine</html>"
    with pytest.raises(UserError, match="is a folder"):
        report(run, out=tmp_path, say=lambda _: None)
    assert report(run, out=tmp_path / "new" / "page.html", say=lambda _: None).exists()
    report(run, out=tmp_path / "new" / "page.html", say=lambda _: None)


@pytest.mark.parametrize("where", ["nothing", "."])
def test_a_folder_that_is_no_run_is_one_sentence(tmp_path, where, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path / where)])
    assert ended.value.code == 2
    assert "holds no receipt.json" in capsys.readouterr().err


def test_the_command_names_the_page(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    cli.main(["report", str(run), "--out", str(tmp_path / "a page.html")])
    assert (tmp_path / "a page.html").as_uri() in capsys.readouterr().out
    assert tidy_receipt(run)["status"] == "finished"
