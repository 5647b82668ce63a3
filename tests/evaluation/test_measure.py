from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.core.keys import rng
from marey.evaluation.classifiers import fit_linear, knn_probabilities
from marey.evaluation.intervals import paired_gain, wilson
from marey.evaluation.measure import Side, choose_strength, measure
from marey.evaluation.split import held_out


def clouds(videos: int, clips: int, *, spread: float, seed: int, classes: int = 3) -> Side:
    """Clips around one centre per class; `noise` is the same without the centres."""
    draw = rng(seed, "test-clouds")
    centres = rng(0, "test-centres").normal(size=(classes, 8))
    labels = [f"c{v % classes}" for v in range(videos) for _ in range(clips)]
    noise = draw.normal(size=(videos * clips, 8)).astype(np.float32)
    signal = centres[[int(name[1]) for name in labels]].astype(np.float32)
    return Side(
        {"pretrained": signal + spread * noise, "random": noise},
        [f"/data/{seed}/{v:03d}.mp4" for v in range(videos) for _ in range(clips)],
        labels,
    )


def test_features_that_hold_the_class_beat_features_that_do_not():
    result = measure(clouds(60, 2, spread=0.3, seed=1), clouds(90, 2, spread=0.3, seed=2), label="kind", seed=0)
    good, noise = result.encoders["pretrained"], result.encoders["random"]
    assert good.linear.accuracy > 0.95
    assert good.knn.accuracy > 0.95
    assert noise.linear.accuracy < 0.6
    assert result.gains["linear"].low > 0.3
    assert result.chance.accuracy == pytest.approx(1 / 3)
    assert (result.train_videos, result.train_clips, result.test_videos, result.test_clips) == (
        60,
        120,
        90,
        180,
    )


def test_shuffled_labels_score_chance():
    train, test = clouds(150, 2, spread=0.3, seed=1), clouds(240, 1, spread=0.3, seed=2)
    by_video = {v: f"c{int(rng(3, 'test-shuffle', i).integers(3))}" for i, v in enumerate(sorted(set(train.videos)))}
    shuffled = Side(train.features, train.videos, [by_video[v] for v in train.videos])
    scores = measure(shuffled, test, label="kind", seed=0).encoders["pretrained"]
    for score in (scores.knn, scores.linear):
        assert score.low < 1 / 3 + 0.1
        assert score.accuracy < 0.5


def test_a_video_counts_once_however_many_clips_it_has():
    train = clouds(30, 1, spread=0.2, seed=1)
    test = clouds(12, 1, spread=0.2, seed=2)
    many = test.take(np.ones(12, dtype=bool))
    heavy = Side(
        {name: np.repeat(x, [5] + [1] * 11, axis=0) for name, x in many.features.items()},
        [many.videos[0]] * 5 + list(many.videos[1:]),
        [many.labels[0]] * 5 + list(many.labels[1:]),
    )
    plain, repeated = measure(train, test, label="k", seed=0), measure(train, heavy, label="k", seed=0)
    assert repeated.encoders == plain.encoders
    assert repeated.test_videos == 12


def test_clip_probabilities_are_averaged_before_the_class_is_read_off():
    train = Side({"e": np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]], np.float32)}, list("abcd"), ["x", "x", "y", "y"])
    # Two faint clips say y, one clear clip says x: the mean says x, a vote of clips would say y.
    test = Side({"e": np.array([[1.0, 0.0], [0.69, 0.72], [0.69, 0.72]], np.float32)}, ["v"] * 3, ["x"] * 3)
    assert measure(train, test, label="k", seed=0).encoders["e"].linear.right == 1


def test_nothing_of_the_held_out_side_changes_what_was_fitted():
    train = clouds(40, 2, spread=1.5, seed=1)
    strengths = {
        measure(train, clouds(20, 1, spread=1.5, seed=s), label="k", seed=0).encoders["pretrained"].linear_strength
        for s in range(2, 6)
    }
    assert len(strengths) == 1


def test_strength_is_chosen_on_other_videos_than_it_is_fitted_on():
    # A feature that names the video: worthless on a new one, perfect on its other clips.
    draw = rng(0, "test-names")
    videos = [f"{v}.mp4" for v in range(40) for _ in range(4)]
    y = np.repeat(np.arange(40) % 2, 4)
    x = np.repeat(draw.normal(size=(40, 200)), 4, axis=0).astype(np.float32)
    side = held_out(videos, y, share=0.2, seed=0, purpose="probe-validation")
    assert {v for v, out in zip(videos, side, strict=True) if out}.isdisjoint(
        v for v, out in zip(videos, side, strict=True) if not out
    )
    assert choose_strength(x, y, videos, classes=2, seed=0) in (0.001, 0.01, 0.1, 1.0, 10.0)


@pytest.mark.parametrize(("videos", "draws"), [(40, 5), (400, 3), (1000, 1)])
def test_few_videos_choose_a_strength_on_several_draws_of_a_fifth(
    videos: int, draws: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def watched(*given, purpose: str, **named):
        asked.append(purpose)
        return held_out(*given, purpose=purpose, **named)

    monkeypatch.setattr("marey.evaluation.measure.held_out", watched)
    y = np.arange(videos) % 2
    x = y[:, None] + rng(0, "test-strength").normal(size=(videos, 2)).astype(np.float32)
    choose_strength(x.astype(np.float32), y, [f"{v}.mp4" for v in range(videos)], classes=2, seed=0)
    assert asked == ["probe-validation", *(f"probe-validation-{i}" for i in range(1, draws))]


def test_with_few_clips_the_largest_class_does_not_win_by_its_size():
    x = np.repeat(np.eye(2, dtype=np.float32), [6, 9], axis=0)
    y = np.repeat([0, 1], [6, 9])
    assert knn_probabilities(x, y, x, classes=2).argmax(axis=1).tolist() == y.tolist()


def test_knn_is_its_definition():
    draw = rng(1, "test-knn")
    train, test = (draw.normal(size=(n, 5)).astype(np.float32) for n in (30, 7))
    y = draw.integers(0, 3, size=30)
    got = knn_probabilities(train, y, test, classes=3, k=4)
    for row, x in zip(got, test.astype(np.float64), strict=True):
        similarity = [float(x @ t / np.linalg.norm(x) / np.linalg.norm(t)) for t in train.astype(np.float64)]
        votes = [0.0] * 3
        for i in sorted(range(30), key=lambda i: -similarity[i])[:4]:
            votes[int(y[i])] += math.exp(similarity[i] / 0.07)
        assert row == pytest.approx(np.array(votes) / sum(votes), abs=1e-5)


def test_more_neighbours_than_clips_is_no_error():
    got = knn_probabilities(np.eye(3, dtype=np.float32), np.array([0, 1, 1]), np.eye(3, dtype=np.float32), classes=2)
    assert got.shape == (3, 2)
    assert np.isfinite(got).all()


def test_a_feature_that_never_varies_is_ignored():
    x = np.c_[np.linspace(-1, 1, 40), np.full(40, 1e5)].astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    fit = fit_linear(x, y, classes=2, strength=1.0)
    moved = x.copy()
    moved[:, 1] += 1.0
    assert np.array_equal(fit.probabilities(x), fit.probabilities(moved))


def test_wilson_matches_published_values():
    # Newcombe, Statistics in Medicine 17, 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, total, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(right, total) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_own_share(case):
    right, total = case
    low, high = wilson(right, total)
    assert 0 <= low <= right / total <= high <= 1


def test_a_paired_gain_is_surer_than_two_intervals_apart():
    right_b = rng(0, "test-pairs").random(200) < 0.5
    right_a = right_b.copy()
    right_a[np.flatnonzero(~right_b)[:20]] = True
    gain, low, high = paired_gain(right_a, right_b, seed=0)
    assert gain == pytest.approx(0.1)
    assert 0.05 < low < gain < high < 0.15
    assert wilson(int(right_a.sum()), 200)[0] < wilson(int(right_b.sum()), 200)[1]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2)), min_size=2, max_size=60),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_a_split_is_by_video_and_does_not_depend_on_the_order_of_clips(rows, seed, shuffle):
    files = [f"/a/b/{v}.mp4" for v, _ in rows]
    labels = [label for _, label in rows]
    out = dict(zip(files, held_out(files, labels, share=0.2, seed=seed, purpose="p"), strict=True))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    again = held_out([files[i] for i in order], [labels[i] for i in order], share=0.2, seed=seed, purpose="p")
    assert [out[files[i]] for i in order] == again.tolist()


def test_a_split_holds_out_a_fifth_of_every_class_and_survives_a_move():
    files = [f"/old/place/{'ab'[v % 2]}/{v}.mp4" for v in range(100)]
    labels = [v % 2 for v in range(100)]
    out = held_out(files, labels, share=0.2, seed=0, purpose="p")
    assert [sum(out[c::2]) for c in (0, 1)] == [10, 10]
    moved = [f.replace("/old/place", "/new") for f in files]
    assert np.array_equal(out, held_out(moved, labels, share=0.2, seed=0, purpose="p"))
    assert not np.array_equal(out, held_out(files, labels, share=0.2, seed=1, purpose="p"))


def test_a_class_of_two_videos_keeps_one_on_each_side():
    out = held_out(["a", "b", "c", "c"], [0, 0, 1, 1], share=0.2, seed=0, purpose="p")
    assert sorted(out[:2].tolist()) == [False, True]
    assert out[2:].tolist() == [False, False]


def test_more_features_than_clips_are_fitted_among_the_clips_without_a_difference():
    from sklearn.linear_model import LogisticRegression

    draw = rng(0, "test-wide")
    x, new = (draw.normal(size=(n, 90)).astype(np.float32) for n in (30, 20))
    y = (x[:, :3].sum(axis=1) > 0).astype(np.int64) + (x[:, 4] > 1)
    fit = fit_linear(x, y, classes=3, strength=0.1)
    assert fit.basis is not None
    assert fit.basis.shape == (90, 30)
    mean, scale = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    plain = LogisticRegression(C=0.1, max_iter=1000, tol=1e-8).fit((x - mean) / scale, y)
    assert np.allclose(fit.probabilities(new), plain.predict_proba((new - mean) / scale), atol=2e-3)
