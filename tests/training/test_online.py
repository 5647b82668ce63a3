from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from marey.core.errors import UserError
from marey.objectives.collapse import rankme
from marey.objectives.registry import build
from marey.pixels.evalclips import EvalClips
from marey.pixels.open import open_source
from marey.training.metrics import TIME_COLUMNS
from marey.training.online import COLUMNS, OnlineProbe, neighbour_accuracy

PROBE = ("probe.every_n_steps=2", "trainer.log_every_n_steps=1", "probe.clips=12")


def probe_of(config) -> OnlineProbe:
    source = open_source(config.data.train, name=None, video_rate=15.0, video_episode_length=128)
    return OnlineProbe(config, source)


def test_a_run_that_looks_has_the_weights_of_one_that_does_not(train):
    options = ("trainer.max_steps=4", "trainer.log_every_n_steps=1", "ema.update_every=1")
    blind, seeing = train("blind", *options), train("seeing", *options, *PROBE)
    a, b = blind.checkpoint(), seeing.checkpoint()
    for key in ("state_dict", "state_dict_ema"):
        assert a[key].keys() == b[key].keys()
        assert all(torch.equal(a[key][name], b[key][name]) for name in a[key])
    state, other = (x["optimizer_states"][0]["state"] for x in (a, b))
    assert all(torch.equal(state[i][name], other[i][name]) for i in state for name in state[i])
    for before, after in zip(blind.rows(), seeing.rows(), strict=True):
        assert [after.pop(name) != "" for name in COLUMNS] == [after["step"] in "124"] * 3
        assert {k: v for k, v in before.items() if k not in TIME_COLUMNS} == {
            k: v for k, v in after.items() if k not in TIME_COLUMNS
        }
    assert "probe/rank" not in blind.rows()[0]
    assert any("online probe" in line for line in seeing.lines)


def test_a_look_changes_nothing_and_is_the_same_twice(small):
    config = small(*PROBE)
    objective = build(config)
    objective.train()
    objective.encoder.eval()  # a part that somebody froze stays as it was
    before = copy.deepcopy(objective.state_dict())
    modes = [module.training for module in objective.modules()]
    random = torch.random.get_rng_state()
    probe = probe_of(config)
    first = probe.look(objective)
    assert probe.look(objective) == first
    assert [module.training for module in objective.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_a_look_measures_the_features_of_whole_clips(small):
    config = small(*PROBE)
    objective = build(config).double().eval()
    probe = probe_of(config)
    found = probe.look(objective)
    model = config.model
    clips = EvalClips(
        probe.source, num_frames=model.num_frames, frame_stride=config.frame_stride, img_size=model.img_size
    )
    video = clips.__getitems__(probe._numbers).video
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (video.double() / 255 - mean.view(1, 3, 1, 1, 1)) / std.view(1, 3, 1, 1, 1)
    with torch.no_grad():
        x = objective.encoder(pixels)[:, 0]
        z = objective.projector(x.unsqueeze(1))
        whole = objective.sigreg(z.transpose(0, 1), micro_step=0)
    assert len(set(probe._numbers)) == 12
    assert found["probe/rank"] == pytest.approx(float(rankme(x)), rel=1e-4)
    assert found["probe/sigreg"] == pytest.approx(float(whole), rel=1e-4)
    assert 0 <= found["probe/knn"] <= 1


def test_neighbours_of_other_videos_decide():
    x = torch.eye(4).repeat_interleave(3, dim=0) + 0.01 * torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4).repeat_interleave(3)
    assert neighbour_accuracy(x, labels, torch.arange(12)) == 1.0
    # Of each group of alike clips all are one video: nobody is left that could be right.
    assert neighbour_accuracy(x, labels, labels) == 0.0
    assert neighbour_accuracy(x, torch.zeros(12, dtype=torch.int64), torch.arange(12)) is None
    unknown = torch.where(torch.arange(12) < 6, labels, -1)
    assert neighbour_accuracy(x, unknown, torch.arange(12)) == 1.0
    assert neighbour_accuracy(x, torch.full((12,), -1), torch.arange(12)) is None


def test_few_clips_of_two_even_classes_are_not_outvoted_by_the_other_class() -> None:
    labels = torch.arange(16) % 2
    x = torch.nn.functional.one_hot(labels, 2).float()
    assert neighbour_accuracy(x, labels, torch.arange(16)) == 1.0


def test_labels_that_say_nothing_score_chance():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 16, generator=generator)
    found = neighbour_accuracy(x, torch.randint(0, 4, (600,), generator=generator), torch.arange(600))
    assert found is not None
    assert abs(found - 0.25) < 0.07


def test_without_labels_rank_and_statistic_are_left(small):
    config = small(*PROBE)
    probe = probe_of(config)
    probe.source.labels = None
    assert "no labels" in probe.describe()
    assert set(probe.look(build(config))) == {"probe/rank", "probe/sigreg"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("probe.every_n_steps=3", "trainer.log_every_n_steps=2"), "must be a multiple of trainer.log_every_n_steps"),
        (("probe.every_n_steps=0",), "probe.every_n_steps"),
        (("probe.clips=1",), "probe.clips"),
        (("probe.evry_n_steps=1",), "every_n_steps"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(small, overrides, words):
    with pytest.raises(UserError, match=words):
        small(*overrides)


def test_data_that_is_not_there_is_refused_before_training(train, tmp_path):
    with pytest.raises(UserError, match=r"none\.lance"):
        train("run", *PROBE, "trainer.max_steps=2", f"probe.data={tmp_path / 'none.lance'}")


def test_looking_may_be_turned_on_and_off_at_a_resume(train):
    first = train("a", "trainer.max_steps=2", "trainer.log_every_n_steps=1", checkpoints="kept")
    path = first.checkpoints / "last.ckpt"
    resume = (f"resume.ckpt_path={path}", "resume.weights_only=false", "resume.allow_changes=[trainer.max_steps]")
    second = train("a", "trainer.max_steps=4", *PROBE, *resume, checkpoints="kept")
    rows = second.rows()
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["probe/rank"] != "" for row in rows] == [False, False, False, True]
    assert np.isfinite(float(rows[3]["probe/sigreg"]))
    assert Path(path).exists()
