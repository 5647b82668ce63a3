"""A stream of frames against the full forward pass, in float64 unless a test says otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marey.core.errors import UserError
from marey.core.tokens import grid_positions, patchify
from marey.models.rope import rotary_tables, rotate
from marey.models.streaming import StreamingEncoder
from marey.models.vit import VisionTransformer
from tests.models.samples import encoder

FRAMES, SIDE, PATCHES = 6, 16, 4


def clip(frames: int = FRAMES, *, batch: int = 2, seed: int = 0, side: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, frames, side, side, generator=generator, dtype=torch.float64)


@torch.no_grad()
def windowed(model: VisionTransformer, video: Tensor, *, window: int, moving: bool) -> tuple[Tensor, Tensor]:
    """Patches ``[B, T, P, D]`` and summaries ``[B, T, D]`` by definition, one frame after another, with dense masks.

    Each frame attends to the ``window`` newest frames up to itself; ``moving``: they stand at 0 .. window-1 whenever
    a frame looks at them, else where they are in the video.
    """
    b, _, t = video.shape[:3]
    tokens = model.patch_embed(patchify(video, patch=model.patch_size, tubelet=model.tubelet_size))
    per = tokens.shape[1] // t
    frames = list(tokens.split(per, dim=1))
    summaries = [model.cls_token.expand(b, 1, -1) for _ in frames]  # [CLS] as of each frame
    head_dim = model.embed_dim // model.num_heads

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (model.num_heads, head_dim)).transpose(1, 2)

    def turned(x: Tensor, time: int) -> Tensor:
        where = grid_positions((1, video.shape[3] // model.patch_size, video.shape[4] // model.patch_size))
        where[:, 0] = time
        cos, sin = rotary_tables(where, head_dim=head_dim, layout=model.rope_layout, dtype=x.dtype)
        return rotate(x, cos, sin, out=torch.empty_like(x))

    for block in model.blocks:
        packed = [block.attn.qkv(block.norm1(x)).chunk(3, dim=-1) for x in frames]
        own = [block.attn.qkv(block.norm1(x)).chunk(3, dim=-1) for x in summaries]
        new_frames, new_summaries = [], []
        for i in range(t):
            start = max(0, i - window + 1)
            shift = start if moving else 0
            near = range(start, i + 1)
            keys = torch.cat([turned(heads(packed[j][1]), j - shift) for j in near], dim=2)
            values = torch.cat([heads(packed[j][2]) for j in near], dim=2)

            def gather(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                weights = (q @ k.mT / head_dim**0.5).softmax(dim=-1)
                return block.attn.proj((weights @ v).transpose(1, 2).flatten(2))  # noqa: B023

            x = frames[i] + gather(turned(heads(packed[i][0]), i - shift), keys, values)
            new_frames.append(x + block.mlp(block.norm2(x)))
            q, k, v = (heads(part) for part in own[i])
            s = summaries[i] + gather(q, torch.cat((k, keys), dim=2), torch.cat((v, values), dim=2))
            new_summaries.append(s + block.mlp(block.norm2(s)))
        frames, summaries = new_frames, new_summaries
    return torch.stack([model.norm(x) for x in frames], 1), torch.cat([model.norm(s) for s in summaries], 1)


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"rope_layout": "tiled"}, 2),
        ({"rope_layout": "rotary"}, 1),
        ({"use_rope": False}, 2),
        ({"tubelet_size": 2}, 2),
        ({"name": "vit_tiny"}, 1),
    ],
)
def test_every_prefix_is_the_full_forward_pass(changes, batch):
    model = encoder(**changes).eval()
    video, tubelet = clip(batch=batch), model.tubelet_size
    stream = StreamingEncoder(model, positions=FRAMES // tubelet)
    for end in range(tubelet, FRAMES + 1, tubelet):
        got = stream.push(video[:, :, end - tubelet : end])
        with torch.no_grad():
            full = model(video[:, :, :end])
        assert (got.summary[:, 0] - full[:, 0]).abs().max() <= 1e-12
        assert (got.patches[:, 0] - full[:, -PATCHES:]).abs().max() <= 1e-12
    assert stream.seen == FRAMES // tubelet


def test_float32_agrees_within_rounding():
    model = encoder().float().eval()
    video = clip().float()
    got = StreamingEncoder(model, positions=FRAMES).push(video)
    with torch.no_grad():
        full = model(video)
    assert got.summary.dtype == torch.float32
    assert torch.allclose(got.summary[:, -1], full[:, 0], atol=2e-5, rtol=1e-5)
    assert torch.allclose(got.patches.flatten(1, 2), full[:, 1:], atol=2e-5, rtol=1e-5)


def test_frames_may_come_one_at_a_time_or_several_together():
    model, video = encoder(), clip()
    whole = StreamingEncoder(model, positions=FRAMES).push(video)
    stream = StreamingEncoder(model, positions=FRAMES)
    parts = [stream.push(video[:, :, a:b]) for a, b in ((0, 1), (1, 4), (4, 6))]
    assert torch.equal(torch.cat([part.summary for part in parts], dim=1), whole.summary)
    assert torch.equal(torch.cat([part.patches for part in parts], dim=1), whole.patches)


def test_a_new_frame_costs_one_frame_however_many_came_before():
    model, video = encoder(), clip(frames=10, batch=1)
    layers = [layer for block in model.blocks for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc1)]
    counted: list[int] = []
    for layer in layers:
        layer.register_forward_hook(lambda _m, inputs, _o: counted.append(inputs[0].numel() // inputs[0].shape[-1]))
    stream = StreamingEncoder(model, positions=4, sliding=True)
    costs = []
    for i in range(10):
        counted.clear()
        stream.push(video[:, :, i : i + 1])
        assert len(counted) == len(layers)
        costs.append(set(counted))
    assert costs == [{1 + PATCHES}] * 10
    counted.clear()
    model(video)
    assert set(counted) == {1 + 10 * PATCHES}


@pytest.mark.parametrize("layout", ["tiled", "rotary"])
def test_a_sliding_window_is_what_it_says(layout):
    model, video = encoder(rope_layout=layout), clip(frames=9)
    stream = StreamingEncoder(model, positions=4, sliding=True)
    parts = [stream.push(video[:, :, i : i + 1]) for i in range(9)]
    patches, summary = windowed(model, video, window=4, moving=True)
    assert (torch.cat([part.patches for part in parts], dim=1) - patches).abs().max() <= 1e-12
    assert (torch.cat([part.summary for part in parts], dim=1) - summary).abs().max() <= 1e-12
    with torch.no_grad():
        assert (summary[:, 3] - model(video[:, :, :4])[:, 0]).abs().max() <= 1e-12
        # A window is no fresh start: frames that left it have left their traces.
        assert (summary[:, 8] - model(video[:, :, 5:])[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(("layout", "same"), [("rotary", True), ("tiled", False)])
def test_with_rotary_positions_a_sliding_window_is_one_pass_over_the_whole_video(layout, same):
    model, video = encoder(rope_layout=layout), clip(frames=9)
    got = StreamingEncoder(model, positions=4, sliding=True).push(video)
    patches, _ = windowed(model, video, window=4, moving=False)
    assert bool((got.patches - patches).abs().max() <= 1e-12) is same


def test_a_stream_that_is_full_takes_nothing_in_until_reset():
    model, video = encoder(), clip(frames=7)
    stream = StreamingEncoder(model, positions=6)
    first = stream.push(video[:, :, :5])
    with pytest.raises(UserError, match=r"has seen 5 of the 6 positions .* and was given 2 more; call reset\(\)"):
        stream.push(video[:, :, 5:])
    assert stream.seen == 5
    sixth = stream.push(video[:, :, 5:6])
    with torch.no_grad():
        assert (sixth.summary[:, 0] - model(video[:, :, :6])[:, 0]).abs().max() <= 1e-12
    stream.reset()
    assert torch.equal(stream.push(video[:, :, :5]).summary, first.summary)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(UserError, match=r"model\.attn_mode=full cannot be streamed"):
        StreamingEncoder(encoder(attn_mode="full"), positions=4)
    with pytest.raises(UserError, match=r"model\.use_rope=false"):
        StreamingEncoder(encoder(use_rope=False), positions=4, sliding=True)
    with pytest.raises(UserError, match="at least 1"):
        StreamingEncoder(encoder(), positions=0)
    stream = StreamingEncoder(encoder(tubelet_size=2), positions=4)
    with pytest.raises(UserError, match="axis 2 is 1, not a multiple of 2"):
        stream.push(clip(1))
    stream.push(clip(2))
    with pytest.raises(UserError, match="holds 2 videos of 16 x 16 pixels and was given 1 video of 16 x 16 pixels"):
        stream.push(clip(2, batch=1))
    with pytest.raises(UserError, match="was given 2 videos of 32 x 32 pixels; keep the size"):
        stream.push(clip(2, side=32))
    with pytest.raises(UserError, match="normalised floating-point video"):
        stream.push(clip(2).to(torch.uint8))


def test_outputs_feed_what_is_trained_on_top():
    model = encoder()
    head = torch.nn.Linear(model.embed_dim, 2).double()
    head(StreamingEncoder(model, positions=FRAMES).push(clip()).summary).sum().backward()
    assert head.weight.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())
