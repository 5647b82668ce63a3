from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marey.evaluation.feature_maps import (
    Place,
    against_most,
    feature_colours,
    for_show,
    heat,
    marked,
    odd_patch,
    over_frames,
    similarity,
)


def patches(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_three_colours_carry_the_variance_that_they_say():
    x = patches(2, 3, 4, 5, 8) * torch.linspace(3, 0.2, 8)
    coloured = feature_colours(x)
    rows = x.flatten(0, 3).double().numpy()
    spread = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2
    assert abs(coloured.share - spread[:3].sum() / spread.sum()) < 1e-5
    assert coloured.frames.shape == (2, 3, 4, 5, 3)
    assert coloured.frames.dtype == np.uint8


def test_equal_features_have_equal_colours_in_every_clip_and_frame():
    x = patches(2, 3, 4, 5, 8)
    x[1, 2, 3, 4] = x[0, 0, 0, 0]
    frames = feature_colours(x).frames
    assert np.array_equal(frames[1, 2, 3, 4], frames[0, 0, 0, 0])
    assert len(np.unique(frames.reshape(-1, 3), axis=0)) > 20


def test_features_that_do_not_vary_are_one_colour():
    coloured = feature_colours(torch.ones(1, 2, 2, 2, 8))
    assert coloured.share == 0
    assert len(np.unique(coloured.frames.reshape(-1, 3), axis=0)) == 1


def test_the_odd_patch_of_the_first_frame_is_found():
    x = torch.ones(2, 3, 4, 8) + 0.01 * patches(2, 3, 4, 8)
    x[1, 0, 0] = -1  # of a later frame: not asked about
    x[0, 2, 1] = torch.tensor([1.0, -1.0] * 4)
    assert odd_patch(x) == Place(0, 2, 1)


def test_similarity_is_the_cosine_of_centred_features():
    x = patches(3, 4, 5, 8, seed=3) + 7
    found = similarity(x, Place(0, 2, 1))
    y = x.double().numpy()
    y = y - y.reshape(-1, 8).mean(axis=0)
    y /= np.linalg.norm(y, axis=-1, keepdims=True)
    assert np.abs(found - np.clip(y @ y[0, 2, 1], 0, 1)).max() < 1e-5
    assert found[0, 2, 1] > 0.9999
    assert found.min() == 0


def test_maps_lie_over_the_pixels_they_belong_to():
    frames = np.full((4, 16, 24, 3), 100, np.uint8)
    colours = np.zeros((2, 2, 3, 3), np.uint8)
    colours[1, 0, 2] = (200, 0, 0)
    shown = over_frames(frames, colours, share=0.5)
    lit = shown[..., 0] == 150
    assert lit.sum() == 2 * 8 * 8
    assert lit[2:, :8, 16:].all()
    assert (shown[~lit] == 50).all()


def test_a_marked_patch_keeps_its_inside_and_the_other_frames():
    frames = np.random.default_rng(0).integers(1, 250, size=(4, 16, 24, 3), dtype=np.uint8)
    out = marked(frames, Place(1, 0, 2), (2, 2, 3))
    assert np.array_equal(out[:2], frames[:2])
    assert (out[2:, 0, 16:] == 255).all()
    assert (out[2:, 7, 16:] == 255).all()
    assert (out[2:, 8, 16:] < 30).all()
    assert (out[2:, :8, 15] < 30).all()
    assert np.array_equal(out[2:, 1:7, 17:23], frames[2:, 1:7, 17:23])
    assert not np.array_equal(out, frames)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.sampled_from([8, 16, 32, 128, 224]), st.integers(1, 9))
def test_what_is_shown_has_few_frames_of_about_one_size(frames, size, most):
    shown = for_show(np.zeros((frames, size, size, 3), np.uint8), side=64, most=most)
    assert len(shown) == min(frames, most)
    assert shown.shape[1] == shown.shape[2]
    assert 64 <= shown.shape[1] < 128


def test_frames_for_show_run_from_the_first_to_the_last():
    frames = np.arange(10, dtype=np.uint8)[:, None, None, None] * np.ones((1, 64, 64, 3), np.uint8)
    assert for_show(frames, side=64, most=4)[:, 0, 0, 0].tolist() == [0, 3, 6, 9]


def test_heat_grows_lighter_all_the_way():
    light = heat(np.linspace(0, 1, 101, dtype=np.float32)).astype(int).sum(axis=-1)
    assert (np.diff(light) >= 0).all()
    assert light[0] < 80
    assert light[-1] > 600


def test_weights_are_shown_as_shares_of_the_largest():
    assert np.allclose(against_most(torch.tensor([[[0.1, 0.4]]])), [[[0.25, 1.0]]])
    assert not against_most(torch.zeros(1, 1, 2)).any()
