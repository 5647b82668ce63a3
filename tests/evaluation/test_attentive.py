from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm, multi_head_attention_forward

from marey.core.keys import rng
from marey.evaluation import attentive_fit as room
from marey.evaluation.attentive import AttentiveProbes, head_count
from marey.evaluation.attentive_fit import DEFAULT, GRID, Setting, fit_attentive, probe_attentive
from marey.evaluation.measure import Side, measure
from marey.evaluation.split import few_per_class
from marey.evaluation.token_features import Tokens

WIDTH = 8


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Fewer steps than a person gets: enough for what is tested."""
    monkeypatch.setattr(room, "EPOCHS", 12)
    monkeypatch.setattr(room, "MIN_STEPS", 60)


def stored(values: np.ndarray) -> Tokens:
    offset = values[0].mean(axis=0).astype(np.float32)
    return Tokens((values - offset).astype(np.float16), offset, np.arange(len(values)))


def needles(clips: int, *, seed: int, tokens: int = 6) -> tuple[Tokens, np.ndarray]:
    """One token of each clip, in a place of its own, says the class; their mean over tokens hardly does."""
    draw = rng(seed, "test-needles")
    y = draw.integers(0, 3, size=clips)
    x = draw.normal(size=(clips, tokens, WIDTH)) + 5.0
    x[..., 3:5] = 5.0
    place = draw.integers(0, tokens, size=clips)
    x[np.arange(clips), place, 3] = 15.0
    x[np.arange(clips), place, :3] = 5 + 4 * np.eye(3)[y]
    return stored(x), y


def test_one_query_is_multi_head_attention_with_keys_and_values_of_every_token():
    torch.manual_seed(0)
    width, heads, tokens = 64, 2, 5
    mean, deviation = torch.randn(width), torch.rand(width) + 0.5
    probes = AttentiveProbes(probes=3, classes=4, mean=mean, inverse=1 / deviation, seed=0).double()
    assert probes.heads == heads
    for parameter in probes.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(7, tokens, width, dtype=torch.float64) * 2 + 1
    found = probes(x)
    standard = (x - probes.mean) * probes.inverse
    for i in range(3):
        query = probes.query[i].expand(1, 7, width)
        keys = probes.to_key[i].permute(1, 0, 2).reshape(width, width)
        values = probes.to_value[i].permute(1, 0, 2).reshape(width, width)
        bias = torch.cat((probes.to_query_bias[i], torch.zeros(width, dtype=torch.float64), probes.to_value_bias[i]))
        attended, _ = multi_head_attention_forward(
            query,
            standard.transpose(0, 1),
            standard.transpose(0, 1),
            width,
            heads,
            torch.cat((probes.to_query[i].T, keys.T, values.T)),
            bias,
            None,
            None,
            False,
            0.0,
            probes.out[i].T,
            probes.out_bias[i],
        )
        y = query[0] + attended[0]
        inner = layer_norm(y, (width,), probes.norm1[i], probes.norm1_bias[i])
        y = y + gelu(inner @ probes.fc1[i] + probes.fc1_bias[i]) @ probes.fc2[i] + probes.fc2_bias[i]
        y = layer_norm(y, (width,), probes.norm2[i], probes.norm2_bias[i])
        expected = y @ probes.classify[i] + probes.classify_bias[i]
        assert torch.allclose(found[i], expected, rtol=0, atol=1e-12)


def test_it_finds_the_one_token_that_says_the_class():
    (train, y), (test, truth) = needles(180, seed=1), needles(90, seed=2)
    fit = fit_attentive(train, y, classes=3, settings=[Setting(1e-2, 0.01)], seed=0)
    assert (fit.probabilities(test)[0].argmax(axis=1) == truth).mean() > 0.9


def test_settings_side_by_side_learn_what_each_learns_alone():
    tokens, y = needles(70, seed=1)
    settings = [Setting(1e-3, 0.01), Setting(1e-2, 1.0)]
    together = fit_attentive(tokens, y, classes=3, settings=settings, seed=0)
    for place, setting in enumerate(settings):
        alone = fit_attentive(tokens, y, classes=3, settings=[setting], seed=0)
        assert np.allclose(alone.probabilities(tokens)[0], together.probabilities(tokens)[place], atol=1e-4)
    assert not np.allclose(*together.probabilities(tokens), atol=1e-2)


def test_training_is_a_pure_function_of_the_seed():
    tokens, y = needles(40, seed=1)
    first, again, other = (
        fit_attentive(tokens, y, classes=3, settings=[DEFAULT], seed=seed).probabilities(tokens) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_setting_is_chosen_on_videos_kept_aside_and_by_nothing_else(monkeypatch):
    tokens, y = needles(40, seed=1)
    videos = [f"{i // 2}.mp4" for i in range(40)]
    y = np.repeat(y[::2], 2)
    seen: list[tuple[int, int]] = []
    plain = room.fit_attentive

    def watched(part, own, *, settings, **options):
        seen.append((len(part), len(settings)))
        return plain(part, own, settings=settings, **options)

    monkeypatch.setattr(room, "fit_attentive", watched)
    _, choice = probe_attentive(tokens, y, videos, classes=3, seed=0)
    (inside, grid), (whole, one) = seen
    assert (grid, whole, one) == (len(GRID), 40, 1)
    assert choice.validation_videos == (40 - inside) // 2 > 0
    assert choice.validation_right[GRID.index(choice.setting)] == max(choice.validation_right)


def test_a_single_video_of_each_class_leaves_none_to_choose_by():
    tokens, _ = needles(3, seed=1)
    _, choice = probe_attentive(tokens, np.arange(3), ["a", "b", "c"], classes=3, seed=0)
    assert (choice.setting, choice.validation_videos) == (DEFAULT, 0)


def test_shuffled_labels_score_chance_and_true_ones_do_not():
    (train, y), (test, truth) = needles(160, seed=1), needles(300, seed=2)
    shuffled = rng(0, "test-shuffle").permutation(y)
    right = {}
    for name, labels in (("true", y), ("shuffled", shuffled)):
        sides = [
            Side(
                {"e": np.stack([part.batch([i])[0].mean(0).numpy() for i in range(len(part))])},
                [f"{folder}/{i}" for i in range(len(part))],
                [str(k) for k in own],
                {"e": part},
            )
            for folder, part, own in (("a", train, labels), ("b", test, truth))
        ]
        right[name] = measure(*sides, label="kind", seed=0).encoders["e"].attentive
    assert right["true"].low > 0.6
    assert right["shuffled"].low < 1 / 3 < right["shuffled"].high


def test_a_channel_that_never_varies_is_ignored():
    tokens, y = needles(40, seed=1)
    flat = np.concatenate([tokens.batch(range(40)).numpy(), np.full((40, 6, 1), 1e4)], axis=-1)
    fit = fit_attentive(stored(flat), y, classes=3, settings=[DEFAULT], seed=0)
    moved = flat.copy()
    moved[..., -1] += 7
    assert np.isfinite(fit.probabilities(stored(flat))).all()
    assert np.allclose(fit.probabilities(stored(flat)), fit.probabilities(stored(moved)), atol=1e-5)


def test_what_is_stored_in_half_precision_keeps_small_differences():
    draw = rng(0, "test-half")
    values = 30 + 1e-3 * draw.normal(size=(6, 4, WIDTH))
    tokens = stored(values)
    assert np.abs(tokens.batch(range(6)).double().numpy() - values).max() < 5e-6
    mean, deviation = tokens.spread()
    assert mean == pytest.approx(values.mean((0, 1)), abs=1e-5)
    assert deviation == pytest.approx(values.std((0, 1)), rel=1e-2)
    part = tokens.take([4, 1]).take([1])
    assert part.rows.tolist() == [1]


def test_heads_have_at_least_thirty_two_channels():
    assert [head_count(width) for width in (16, 96, 128, 192, 384, 768, 1024, 1408)] == [1, 3, 4, 6, 12, 16, 16, 16]


def test_few_labels_are_nested_keyed_and_by_video():
    files = [f"/data/{v}.mp4" for v in range(40) for _ in range(3)]
    labels = [str(v % 4) for v in range(40) for _ in range(3)]
    one, ten, other = (
        few_per_class(files, labels, per_class=count, seed=0, draw=draw) for count, draw in ((1, 0), (5, 0), (1, 1))
    )
    assert one.sum() == 4 * 3
    assert ten.sum() == 4 * 5 * 3
    assert not (one & ~ten).any()
    assert not np.array_equal(one, other)
    assert few_per_class(files, labels, per_class=99, seed=0, draw=0).all()
    moved = [file.replace("/data", "/elsewhere") for file in files]
    assert np.array_equal(one, few_per_class(moved, labels, per_class=1, seed=0, draw=0))


def test_more_labels_are_worth_more_and_each_draw_is_told():
    (train, y), (test, truth) = needles(60, seed=1), needles(60, seed=2)
    means = [part.batch(range(60)).mean(1).numpy() for part in (train, test)]
    sides = [
        Side({"e": x}, [f"{folder}/{i}" for i in range(60)], [str(k) for k in own])
        for folder, x, own in (("a", means[0], y), ("b", means[1], truth))
    ]
    one, many = measure(*sides, label="kind", seed=0, per_class=[1, 60]).few_labels
    assert one.videos == [3] * 5
    spread = one.encoders["e"]["linear"]
    assert spread.mean == pytest.approx(np.mean(spread.accuracies))
    assert spread.deviation == pytest.approx(np.std(spread.accuracies, ddof=1))
    assert many.videos == [60]
    assert many.encoders["e"]["linear"].deviation == 0.0
    assert many.encoders["e"]["linear"].mean > spread.mean
    assert math.isfinite(many.encoders["e"]["knn"].mean)
