"""Checks of ``gpu.py`` on attention between samples of one batch: the device's kernel against the dense definition.

Every check is a function of a place; on a CPU, at small sizes, it runs the same lines through the CPU's kernels.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import batching
from gpu_rows import Found, Place, Row, within, worst, worst_gradient
from marey.batching.attention import dense_attention, isolated_attention, segmented_attention
from marey.batching.flex import TILE, block_mask, cached_mask, tile_table
from marey.batching.layout import VideoLayout, program_labels, video_layout
from marey.batching.segments import AttentionLayout
from marey.batching.transport import collate
from marey.batching.visibility import UNBOUNDED
from marey.models.video_transformer import VideoTransformerSize, build_video_transformer
from marey.objectives.flow import FlowDraws
from marey.objectives.prefix_suffix import PrefixSuffixObjective
from marey.objectives.video_program import ProgramSettings

CPU = torch.device("cpu")
FLOAT32, FLOAT64, BF16 = torch.float32, torch.float64, torch.bfloat16
ATTENTION_LIMITS = {FLOAT32: 5e-5, FLOAT64: 1e-10, BF16: 4e-2}
"""Relative to the largest entry; bfloat16 keeps 8 bits, and rounds the weights too before they meet the values."""
STRADDLING_LIMIT = 0.05


def lay_out(
    lengths: list[int],
    *,
    tokens: int,
    prefixes: list[int] | None = None,
    words: list[int] | None = None,
    mode: Any = "packed",
    capacity: int | None = None,
) -> VideoLayout:
    """A batch's layout; ``prefixes`` None: every frame sees every other."""
    time = torch.arange(capacity or max(lengths))
    valid = time < torch.tensor(lengths).unsqueeze(1)
    future = torch.zeros_like(valid) if prefixes is None else time >= torch.tensor(prefixes).unsqueeze(1)
    labels = program_labels(
        valid, chunk=future, noisy=torch.zeros_like(valid), reach=torch.full((len(lengths),), UNBOUNDED)
    )
    return video_layout(labels, mode=mode, tokens_per_position=tokens, text_lengths=words, device=CPU)


def two_streams(frames: int, *, tokens: int) -> AttentionLayout:
    """Two samples of the chunked program: a condition frame, noisy frames, the same frames clean; chunks of 2."""
    own = (torch.arange(frames) // 2 + 1).expand(2, -1)
    first = torch.zeros(2, 1, dtype=own.dtype)
    noisy = torch.cat((torch.zeros(frames + 1), torch.ones(frames))).bool().expand(2, -1)
    labels = program_labels(
        torch.ones_like(noisy), chunk=torch.cat((first, own, own), dim=1), noisy=noisy, reach=torch.tensor([2, 4])
    )
    return video_layout(labels, mode="strict", tokens_per_position=tokens, text_lengths=None, device=CPU).attention


def attention_cases(place: Place) -> dict[str, AttentionLayout]:
    """Text first: a kernel compiled for other queries than keys serves equal ones too, and not the other way."""
    lengths, prefixes, words = [9, 20, 5, 14], [1, 2, 4, 8], [3, 150, 20, 77]
    tokens = 3 if place.small else 40
    causal = lay_out(lengths, tokens=tokens, prefixes=prefixes, words=words)
    assert causal.cross is not None
    return {
        "text": causal.cross,
        "prefix": causal.attention,
        "full": lay_out(lengths, tokens=tokens).attention,
        "padded": lay_out(lengths, tokens=tokens, mode="padded", capacity=21).attention,
        "two streams": two_streams(6, tokens=tokens),
    }


def operands(layout: AttentionLayout, *, heads: int, channels: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values and the weights of a loss, float64 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    nq, nk = len(layout.query_labels.sample), len(layout.key_labels.sample)
    return [torch.randn(n, heads, channels, generator=generator, dtype=FLOAT64) for n in (nq, nk, nk, nq)]


def attend(
    kernel: Any, layout: AttentionLayout, tensors: list[Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """Output and the gradients of queries, keys and values."""
    q, k, v = (x.to(device, dtype, copy=True).requires_grad_() for x in tensors[:3])
    out = kernel(q, k, v, layout)
    (out.double() * tensors[3].to(device)).sum().backward()
    return out, q.grad, k.grad, v.grad


def attention(place: Place, *, dtype: torch.dtype, channels: int) -> Found:
    """The kernel of this device, forward and backward, against the dense definition and the CPU's segments."""
    numbers: dict[str, float] = {}
    for name, layout in attention_cases(place).items():
        # Both are given what the dtype can hold, so that the error is the kernel's alone.
        tensors = [x.to(dtype).double() for x in operands(layout, heads=2, channels=channels)]
        own = attend(isolated_attention, layout, tensors, place.device, dtype)
        dense = attend(dense_attention, layout, tensors, place.device, FLOAT64)
        segments = attend(segmented_attention, layout, tensors, CPU, FLOAT64)
        numbers[name] = max(worst(a, b) for reference in (dense, segments) for a, b in zip(own, reference, strict=True))
    return within(numbers, ATTENTION_LIMITS[dtype])


def isolation(place: Place) -> Found:
    """One sample's tokens changed out of all proportion: nothing of the others moves, not by a bit."""
    moved: dict[str, float] = {}
    for name, layout in list(attention_cases(place).items())[:4]:
        tensors = operands(layout, heads=2, channels=32)
        changed = [x.clone() for x in tensors]
        own_q, own_k = layout.query_labels.sample == 1, layout.key_labels.sample == 1
        for x, own in zip(changed[:3], (own_q, own_k, own_k), strict=True):
            x[own] = 30 * x[own] + 7
        for x in (tensors[3], changed[3]):
            x[own_q] = 0  # a loss of the others alone
        before, after = (attend(isolated_attention, layout, x, place.device, FLOAT32) for x in (tensors, changed))
        others = (~own_q, ~own_q, ~own_k, ~own_k)
        same = [
            torch.equal(a[o.to(a.device)], b[o.to(b.device)]) for a, b, o in zip(before, after, others, strict=True)
        ]
        into = max(float(g[o.to(g.device)].abs().max()) for g, o in zip(after[1:], (own_q, own_k, own_k), strict=True))
        moved[name] = float(not all(same)) + into
    return within(moved, 0.0)


def straddling(place: Place) -> Found:
    """Pairs computed beyond those needed, counted from the block masks as the kernel reads them."""
    numbers: dict[str, float] = {}
    batches = {"long": ([20, 33, 48, 64], 270), "16x16": ([4, 8, 12, 16, 20], 64), "8x8": ([4, 8, 12, 16, 20], 16)}
    for name, (lengths, tokens) in batches.items():
        layout = lay_out(lengths, tokens=tokens).attention
        mask = block_mask(layout, place.device)
        assert mask.full_kv_num_blocks is not None
        tiles = int(mask.kv_num_blocks.sum()) + int(mask.full_kv_num_blocks.sum())
        table = tile_table(layout)
        assert tiles == int((table.straddling | table.visible).sum())
        numbers[f"{name}, beyond needed"] = tiles * TILE**2 / layout.needed_pairs - 1
    return Found({**numbers, "limit (long)": STRADDLING_LIMIT}, numbers["long, beyond needed"] < STRADDLING_LIMIT)


def compilations(place: Place) -> Found:
    """Two compilations for a family (text, and video itself), none for batches of other lengths; one mask a layout."""
    from torch._dynamo.utils import counters

    def made() -> int:
        return int(counters["stats"]["unique_graphs"])

    new: list[int] = []
    seconds: list[float] = []
    masks_kept = True
    for lengths, words in (([9, 20, 5], [3, 150, 20]), ([7, 30], [160, 9]), ([12] * 6, [30] * 6), ([31], [140])):
        layout = lay_out(lengths, tokens=40, prefixes=[1] * len(lengths), words=words)
        assert layout.cross is not None
        before = made()
        for one in (layout.attention, layout.cross):
            tensors = operands(one, heads=3, channels=32)
            seconds.append(place.seconds(partial(attend, isolated_attention, one, tensors, place.device, FLOAT32)))
            masks_kept &= cached_mask(one, place.device) is cached_mask(one, place.device)
        new.append(made() - before)
    numbers = {"first batch": new[0], "other lengths": sum(new[1:]), "first seconds": max(seconds[:2])}
    return Found({**numbers, "a call afterwards": min(seconds)}, 1 <= new[0] <= 2 and not any(new[1:]) and masks_kept)


def packed_program(place: Place) -> Found:
    """Loss and gradients of a packed causal step in float32 against float64 on the CPU, same weights, same noise."""
    width, depth = (64, 2) if place.small else (256, 4)
    size = VideoTransformerSize(
        channels=batching.CHANNELS, width=width, depth=depth, heads=4, text_channels=batching.TEXT_CHANNELS
    )
    model = build_video_transformer(size, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # a fresh model's blocks are closed: most gradients would be zero
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    batch = collate(batching.make_samples("8x8", 4, text=True), mode="packed")
    objective = PrefixSuffixObjective(model, ProgramSettings(mode="packed", seed=0), visibility="prefix_causal")
    prepared = objective.prepare(batch, FlowDraws(batch, layout="collated", seed=0, micro_step=0))
    assert batch.text is not None
    assert batch.text_lengths is not None
    text = torch.cat([row[:words] for row, words in zip(batch.text, batch.text_lengths, strict=True)])

    def step(device: torch.device, dtype: torch.dtype) -> tuple[PrefixSuffixObjective, Tensor]:
        own = copy.deepcopy(objective).to(device, dtype)

        def there(x: Any) -> Any:
            moved = x.to(device) if isinstance(x, Tensor) else x
            return moved.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else moved

        mine = prepared._replace(
            **{name: there(value) for name, value in prepared._asdict().items() if name != "labels"}
        )
        out = own.predict(mine, own.lay_out(mine, batch.text_lengths), there(text))
        total = own.decoder.total(out, mine.target, supervised=mine.supervised, times=mine.target_times)
        torch.autograd.backward(total)
        return own, total

    (own, loss), (reference, expected) = step(place.device, FLOAT32), step(CPU, FLOAT64)
    return within({"loss": worst(loss, expected), "gradients": worst_gradient(own, reference)}, 2e-4)


def _attention_row(dtype: torch.dtype, channels: int) -> Row:
    name = f"attention, {str(dtype).removeprefix('torch.')}, {channels} channels a head"
    return Row(name, partial(attention, dtype=dtype, channels=channels), 60)


ATTENTION: list[Row] = [
    *(_attention_row(FLOAT32, channels) for channels in (64, 32, 128, 8, 80)),
    *(_attention_row(BF16, channels) for channels in (64, 128, 36)),
    Row("attention: one sample changed, the others' bits", isolation, 30),
    Row("attention: tiles beyond the pairs needed", straddling, 20),
    Row("attention: compilations and masks kept", compilations, 60, on_cpu=False),
    Row("packed causal step, float32", packed_program, 60),
]
