"""The shared video transformer: positions, patches, initial weights, any even head size."""

from __future__ import annotations

import pytest
import torch

from marey.batching.layout import program_labels, video_layout
from marey.batching.visibility import UNBOUNDED
from marey.models.adaln import gated_add, modulated_norm, time_wave
from marey.models.rope3d import axis_channels, rotary_factors, rotate_pairs
from marey.models.video_transformer import VideoTransformer, VideoTransformerSize, build_video_transformer


def layout_of(model, lengths, capacity, canvas, mode="strict", text_lengths=None):
    valid = torch.arange(capacity) < torch.tensor(lengths).unsqueeze(1)
    labels = program_labels(
        valid,
        chunk=torch.zeros_like(valid),
        noisy=torch.zeros_like(valid),
        reach=torch.full((len(lengths),), UNBOUNDED),
    )
    return video_layout(
        labels,
        mode=mode,
        tokens_per_position=model.tokens_per_position(*canvas),
        text_lengths=text_lengths,
        device=torch.device("cpu"),
    )


def run(model, video, **changes):
    b, _, t, h, w = video.shape
    t //= model.size.patch_t
    fields = {
        "times": torch.full((b, t), 300.0, dtype=video.dtype),
        "positions": torch.arange(t).expand(b, t),
        "layout": layout_of(model, [t] * b, t, (h, w)),
        **changes,
    }
    return model(video, **fields)


def awake(model: VideoTransformer) -> VideoTransformer:
    """Away from the zeros it starts with."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1)
    return model


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [
        (64, (24, 20, 20)),
        (128, (44, 42, 42)),
        (12, (4, 4, 4)),
        (6, (2, 2, 2)),
        (4, (4, 0, 0)),
        (2, (2, 0, 0)),
        (80, (28, 26, 26)),
    ],
)
def test_height_and_width_get_a_third_rounded_down_to_even_and_time_the_rest(head_dim, expected):
    assert axis_channels(head_dim) == expected


@pytest.mark.parametrize("head_dim", [*range(2, 40, 2), 64, 80, 128])
def test_any_even_head_size_works(head_dim):
    size = VideoTransformerSize(channels=2, width=2 * head_dim, depth=1, heads=2)
    model = awake(build_video_transformer(size, seed=0))
    assert torch.isfinite(run(model, torch.randn(1, 2, 3, 4, 4))).all()


def test_scores_depend_on_differences_of_positions_alone():
    q, k = torch.randn(2, 24, 1, 12, dtype=torch.float64)
    grid = {"rows": 2, "columns": 3, "head_dim": 12, "dtype": torch.float64}
    scores = []
    for offset in (0, 17):
        factors = rotary_factors(torch.tensor([0, 1, 4, 9]) + offset, **grid)
        scores.append(torch.einsum("qhd,khd->qk", rotate_pairs(q, factors), rotate_pairs(k, factors)))
    torch.testing.assert_close(*scores)
    assert not torch.allclose(scores[0], torch.einsum("qhd,khd->qk", q, k))


def test_a_rotation_is_the_textbook_one_on_its_axis():
    factors = rotary_factors(torch.tensor([3]), rows=2, columns=2, head_dim=12, dtype=torch.float64)
    angles = torch.tensor(
        [
            [3, 3 * 1e-2, 0, 0, 0, 0],
            [3, 3 * 1e-2, 0, 0, 1, 1e-2],
            [3, 3 * 1e-2, 1, 1e-2, 0, 0],
            [3, 3 * 1e-2, 1, 1e-2, 1, 1e-2],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(factors[:, 0], torch.polar(torch.ones_like(angles), angles))
    x = torch.randn(4, 1, 12, dtype=torch.float64)
    turned = rotate_pairs(x, factors)
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    torch.testing.assert_close(turned[..., 0::2], even * cos - odd * sin)
    torch.testing.assert_close(turned[..., 1::2], even * sin + odd * cos)


def test_modulation_per_frame_equals_modulation_per_token():
    x, branch = torch.randn(2, 6, 5, dtype=torch.float64)
    shift, scale, gate = torch.randn(3, 2, 5, dtype=torch.float64)
    per_token = [m.repeat_interleave(3, dim=0) for m in (shift, scale, gate)]
    normed = torch.nn.functional.layer_norm(x, (5,), eps=1e-6)
    torch.testing.assert_close(modulated_norm(x, shift, scale), normed * (1 + per_token[1]) + per_token[0])
    torch.testing.assert_close(gated_add(x, gate, branch), x + per_token[2] * branch)


def test_times_of_a_thousand_levels_have_a_thousand_embeddings():
    waves = time_wave(torch.arange(1000).double())
    assert waves.shape == (1000, 256)
    assert float(torch.cdist(waves, waves).fill_diagonal_(9).min()) > 1e-3


@pytest.mark.parametrize(("patch", "patch_t"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_patches_return_to_where_they_were(patch, patch_t):
    size = VideoTransformerSize(channels=3, width=8, depth=1, heads=2, patch=patch, patch_t=patch_t)
    model = build_video_transformer(size, seed=0)
    video = torch.randn(2, 3, 4, 4, 8)
    layout = layout_of(model, [4 // patch_t] * 2, 4 // patch_t, (4, 8))
    patches = model._patches(video, layout)
    assert patches.shape == (2 * (4 // patch_t) * (4 // patch) * (8 // patch), 3 * patch_t * patch**2)
    assert torch.equal(model._video(patches, layout, video.shape), video)
    moved = video.clone()
    moved[1, :, 2, 1, 5] += 1
    changed = (model._patches(moved, layout) != patches).any(dim=1).nonzero().flatten().tolist()
    rows, columns = 4 // patch, 8 // patch
    assert changed == [((1 * (4 // patch_t) + 2 // patch_t) * rows + 1 // patch) * columns + 5 // patch]


def test_every_block_starts_as_the_identity_and_the_output_at_zero():
    size = VideoTransformerSize(channels=2, width=24, depth=2, heads=2)
    model = build_video_transformer(size, seed=0)
    assert not bool(run(model, torch.randn(2, 2, 3, 4, 4)).any())
    zero = [name for name, p in model.named_parameters() if p.ndim == 2 and not bool(p.any())]
    assert zero == [
        "blocks.0.modulation.weight",
        "blocks.1.modulation.weight",
        "final.modulation.weight",
        "final.proj.weight",
    ]


def test_weights_are_a_function_of_seed_and_name():
    size = VideoTransformerSize(channels=2, width=24, depth=2, heads=2, text_channels=5)
    first, again, other = (build_video_transformer(size, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    shallow = VideoTransformerSize(channels=2, width=24, depth=1, heads=2, text_channels=None)
    small = build_video_transformer(shallow, seed=3).state_dict()
    assert all(torch.equal(first[name], value) for name, value in small.items())


def test_height_width_time_and_noise_level_all_matter():
    size = VideoTransformerSize(channels=2, width=24, depth=1, heads=2)
    model = awake(build_video_transformer(size, seed=0)).double()
    video = torch.randn(1, 2, 1, 4, 4, dtype=torch.float64).expand(1, 2, 4, 4, 4)
    still = run(model, video)
    assert not torch.allclose(still, run(model, video, positions=torch.tensor([[0, 2, 4, 6]])))
    assert not torch.allclose(still, run(model, video, times=torch.full((1, 4), 301.0, dtype=torch.float64)))
    swapped = run(model, video.transpose(3, 4)).transpose(3, 4)
    assert not torch.allclose(still, swapped)


def test_a_text_is_read_by_its_own_sample():
    size = VideoTransformerSize(channels=2, width=24, depth=1, heads=2, text_channels=5)
    model = awake(build_video_transformer(size, seed=0)).double()
    video = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64)
    text = torch.randn(4, 5, dtype=torch.float64)
    for mode in ("strict", "packed"):
        layout = layout_of(model, [3, 3], 3, (4, 4), mode=mode, text_lengths=[3, 1])
        before = run(model, video, text=text, layout=layout)
        changed = text.clone()
        changed[3] += 1
        after = run(model, video, text=changed, layout=layout)
        assert torch.equal(before[0], after[0])
        assert not torch.allclose(before[1], after[1])
