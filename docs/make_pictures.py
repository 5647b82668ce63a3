"""Draws docs/pictures from the library itself: ``python docs/make_pictures.py``.

Every cell and every number is what the layout, the samplers and the plan compute; nothing is drawn by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from marey.batching.layout import VideoLayout, video_layout
from marey.batching.segments import AttentionLayout
from marey.batching.transport import LatentBatch, Mode, collate
from marey.batching.visibility import visibility_matrix
from marey.config.compose import load_config
from marey.core.errors import UserError
from marey.core.latents import Identity, LatentSample
from marey.core.tokens import grid_positions, keep_indices
from marey.models.attention import block_causal_mask
from marey.models.video_transformer import VideoTransformer, VideoTransformerSize
from marey.objectives.chunked_conditioned import ChunkGeometry, chunk_labels
from marey.objectives.prefix_suffix import PrefixSuffixObjective, Visibility
from marey.objectives.video_program import ProgramSettings
from marey.sampling.pools import pool_batches
from marey.training.batchplan import batch_plan

from svg import Drawing, blocks, wrapped  # isort: skip

FOLDER = Path(__file__).parent / "pictures"
DRAWN = ((1, 3), (5, 15), (2, 6), (3, 9), (4, 12), (1, 3), (5, 15), (2, 6))
"""Prefix and future frames of eight draws in a row: geometries of the default ``data.buckets``."""
BATCH = 4


def sample(number: int) -> LatentSample:
    """The draw ``number``, as the latent adapter would hand it over."""
    prefix, future = DRAWN[number]
    return LatentSample(
        video_latents=torch.zeros(1, prefix + future, 1, 1),
        prefix_frames=prefix,
        future_frames=future,
        frame_positions=torch.arange(prefix + future),
        identity=Identity("drawn", f"clip-{number + 1}", f"clip-{number + 1}", 0),
        length_hint=prefix + future,
    )


def program(visibility: Visibility = "full") -> PrefixSuffixObjective:
    """``prefix_suffix`` over a model too small to do anything: its labels do not depend on it."""
    size = VideoTransformerSize(channels=1, width=4, depth=1, heads=1, patch=1)
    return PrefixSuffixObjective(VideoTransformer(size), ProgramSettings(mode="padded", seed=0), visibility=visibility)


def laid_out(batch: LatentBatch, mode: Mode) -> VideoLayout:
    """How the heavy layers see a batch, one token a frame."""
    return video_layout(
        program().labels(batch.lengths, batch.prefixes, batch.capacity),
        mode=mode,
        tokens_per_position=1,
        text_lengths=None,
        device=torch.device("cpu"),
    )


def share(part: float, whole: float) -> str:
    """``42%``"""
    return f"{part / whole:.0%}"


def batching_modes() -> Drawing:
    """The positions that heavy layers see, mode by mode, for the same eight draws."""
    drawing = Drawing(
        width=600,
        title="Four batching modes on the same eight draws",
        description="Rows of cells: one cell is one latent frame that the heavy layers compute. Strict refuses unequal "
        "lengths, padded computes empty cells, bucket fewer of them, packed none.",
    )
    drawn = [sample(number) for number in range(len(DRAWN))]
    in_order = [list(range(start, start + BATCH)) for start in range(0, len(DRAWN), BATCH)]
    lengths = np.array([one.length_hint for one in drawn])
    pooled = pool_batches([lengths], np.arange(len(DRAWN)), batch=BATCH).tolist()
    try:
        collate([drawn[number] for number in in_order[0]], mode="strict")
    except UserError as refusal:
        said = str(refusal).partition(": set")[0]
    y = 28.0
    drawing.text(16, y, "strict", "head")
    for line in wrapped(said, 72):
        y += 20
        drawing.text(16, y, line, "soft")
    modes: tuple[tuple[Mode, list[list[int]]], ...] = (("padded", in_order), ("bucket", pooled), ("packed", in_order))
    for mode, groups in modes:
        y += 40
        y = _one_mode(drawing, y, mode, [collate([drawn[n] for n in group], mode=mode) for group in groups])
    drawing.legend(
        16, y + 30, [("c0", "given (prefix)"), ("c0 late", "predicted (future)"), ("empty", "computed for nothing")]
    )
    drawing.text(16, y + 54, "One cell is one latent frame; one colour is one sample of a microbatch.", "soft")
    return drawing


def _one_mode(drawing: Drawing, y: float, mode: Mode, batches: Sequence[LatentBatch]) -> float:
    """The microbatches of one mode; returns where it ends."""
    layouts = [laid_out(batch, mode) for batch in batches]
    computed = sum(layout.positions for layout in layouts)
    valid = sum(layout.valid_positions for layout in layouts)
    drawing.text(16, y, mode, "head")
    empty = share(computed - valid, computed)
    drawing.text(88, y, f"{computed} frames computed, {valid} of them real: {empty} padding", "soft")
    y += 12
    cell, x = 11.0, 16.0
    for batch, layout in zip(batches, layouts, strict=True):
        places = range(layout.positions) if layout.index is None else layout.index.tolist()
        row_length = layout.positions if mode == "packed" else batch.capacity
        for place, source in enumerate(places):
            of, frame = divmod(source, batch.capacity)
            kind = f"c{of}" if frame < batch.prefixes[of] else f"c{of} late" if frame < batch.lengths[of] else "empty"
            row, column = divmod(place, row_length)
            drawing.rect(x + column * cell, y + row * 15, cell - 1, 13, kind)
        if mode == "packed":
            y += 19
        else:
            x += row_length * cell + 40
    return y if mode == "packed" else y + BATCH * 15


def computed_pairs(layout: AttentionLayout) -> Tensor:
    """bool ``[Nq, Nk]``: the pairs that the attention calls of a layout compute."""
    computed = torch.zeros(len(layout.query_labels.sample), len(layout.key_labels.sample), dtype=torch.bool)
    start_q = start_k = 0
    for group in layout.groups:
        for _ in range(group.samples):
            for part in group.parts:
                queries = torch.arange(group.queries)[part.queries] + start_q
                keys = torch.arange(group.keys)[part.keys] + start_k
                computed[queries.unsqueeze(1), keys] = True
            start_q, start_k = start_q + group.queries, start_k + group.keys
    return computed


def matrix(drawing: Drawing, x: float, y: float, side: float, cells: list[tuple[Tensor, str]]) -> None:
    """Matrices of one shape over one another in a square: rows are queries, columns keys."""
    scale = side / len(cells[0][0])
    drawing.rect(x, y, side, side, "frame")
    for mask, kind in cells:
        for row, column, rows, columns in blocks(mask.tolist()):
            drawing.rect(x + column * scale, y + row * scale, columns * scale, rows * scale, kind)


def batching_attention() -> Drawing:
    """The attention pairs of one microbatch, padded and packed."""
    drawing = Drawing(
        width=600,
        title="Attention of one microbatch, padded and packed",
        description="Two square matrices of queries and keys. Padded computes a full square for every sample, of which "
        "part is padding; packed computes exactly the squares that are needed.",
    )
    batch = collate([sample(number) for number in range(BATCH)], mode="padded")
    modes: tuple[Mode, ...] = ("padded", "packed")
    for x, mode in zip((16.0, 314.0), modes, strict=True):
        layout = laid_out(batch, mode).attention
        computed, labels = computed_pairs(layout), layout.query_labels
        needed = visibility_matrix(labels, layout.key_labels) & labels.valid.unsqueeze(1)
        assert int(computed.sum()) == layout.computed_pairs
        assert int(needed.sum()) == layout.needed_pairs
        assert not bool((needed & ~computed).any())
        own = [(needed & (labels.sample == b).unsqueeze(1), f"c{b}") for b in range(BATCH)]
        drawing.text(x, 28, mode, "head")
        matrix(drawing, x, 40, 270, [(computed, "empty"), *own])
        many, needs = layout.computed_pairs, layout.needed_pairs
        drawing.text(x, 332, f"{many} pairs computed, {share(needs, many)} needed", "soft")
    drawing.text(16, 358, "Rows ask, columns are seen. Neither mode computes anything between samples.", "soft")
    drawing.legend(16, 382, [(f"c{b}", f"sample {b + 1}") for b in range(BATCH)] + [("empty", "masked away")])
    return drawing


def visibility() -> Drawing:
    """Who sees whom within one sample: two visibilities of one program, the other program, and the encoder."""
    drawing = Drawing(
        width=600,
        title="Who sees whom within one sample",
        description="Four matrices, rows ask and columns are seen: prefix_suffix full and prefix_causal, "
        "chunked_conditioned, and the encoder's block_causal attention.",
    )
    panels: list[tuple[str, str, list[tuple[Tensor, str]]]] = []
    choices: tuple[Visibility, ...] = ("full", "prefix_causal")
    for choice in choices:
        labels = program(choice).labels((8,), (3,), 8).at(0)
        seen = visibility_matrix(labels, labels)
        given = (torch.arange(8) < 3).unsqueeze(0)
        panels.append((f"prefix_suffix, {choice}", "3 frames given, 5 predicted", split_columns(seen, given)))
    chunked = chunk_labels([ChunkGeometry(size=2, window=2, condition_index=None)], frames=6).at(0)
    panels.append(
        (
            "chunked_conditioned",
            "chunks of 2: clean, then noisy",
            split_columns(visibility_matrix(chunked, chunked), ~chunked.noisy.unsqueeze(0)),
        )
    )
    frames = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3]])
    seen = torch.isfinite(block_causal_mask(frames, dtype=torch.float32)[0, 0])
    panels.append(
        ("encoder, block_causal", "[CLS], then patches of 4 frames", split_columns(seen, torch.arange(9) < 1))
    )
    for number, (name, note, cells) in enumerate(panels):
        x, y = 16 + 298 * (number % 2), 28 + 318 * (number // 2)
        drawing.text(x, y, name, "head")
        drawing.text(x, y + 20, note, "soft")
        matrix(drawing, x, y + 32, 240, cells)
        drawing.grid(x, y + 32, 240, len(cells[0][0]))
    drawing.legend(16, 652, [("c1", "given, clean or [CLS]"), ("c0", "predicted, noisy or patch")])
    return drawing


def split_columns(seen: Tensor, first: Tensor) -> list[tuple[Tensor, str]]:
    """A visibility matrix in two colours, by what kind of key is seen."""
    return [(seen & first, "c1"), (seen & ~first, "c0")]


def token_drop() -> Drawing:
    """The tokens of one clip that the encoder embeds, in the default recipe."""
    config = load_config([])
    model, side = config.model, config.augmentation.local_size
    drawing = Drawing(
        width=600,
        title="What the encoder computes of one clip",
        description="Sixteen frames of the global view and of one local view as grids of patches; only the few "
        "coloured patches are kept, embedded and encoded.",
    )
    y = 28.0
    times = model.num_frames // model.tubelet_size
    views = (("global view", model.img_size, 0, 1), ("one local view", side, 1, config.augmentation.local_crops_number))
    for name, pixels, view, count in views:
        grid = (times, pixels // model.patch_size, pixels // model.patch_size)
        kept = keep_indices(times * grid[1] * grid[2], model.token_drop_rate, seed=0, epoch=0, position=0, view=view)
        where = grid_positions(grid)[kept].tolist()
        drawing.text(16, y, name + (f", of {count}" if count > 1 else ""), "head")
        total = times * grid[1] * grid[2]
        drawing.text(200, y, f"{len(kept)} of {total:,} patches kept, {times} frames", "soft")
        y += 12
        cell, per_row = (4.7, 8) if view == 0 else (4.7, 16)
        step = grid[2] * cell + (6 if view == 0 else 7.2)
        for frame in range(times):
            row, column = divmod(frame, per_row)
            left, top = 16 + column * step, y + row * step
            drawing.rect(left, top, grid[2] * cell, grid[1] * cell, "empty")
            for _, h, w in (place for place in where if place[0] == frame):
                drawing.rect(left + w * cell, top + h * cell, cell, cell, "c0")
        y += -(-times // per_row) * step + 26
    drawing.bottom = y - 26
    return drawing


BATCHES = (
    ("The recipe: two nodes of eight GPUs", ()),
    ("One node, nothing else changed", ("trainer.num_nodes=1",)),
    ("One node, accumulate_grad_batches=4", ("trainer.num_nodes=1", "accumulate_grad_batches=4")),
    (
        "One node, batch 192 in chunks of 96, norm_group=96",
        (
            "trainer.num_nodes=1",
            "loader.batch_size=192",
            "loader.micro_batch_size=96",
            "projector.norm_group=96",
        ),
    ),
)


def batch_sizes() -> Drawing:
    """Effective batch, statistic batch and norm groups of four ways to run the default recipe."""
    drawing = Drawing(
        width=600,
        title="What one optimizer step is made of",
        description="For four configurations: bars are statistic batches, one below the other they make the effective "
        "batch; cells are BatchNorm groups of 96 clips; a gap separates ranks.",
    )
    recipe = batch_plan(load_config([]), None)
    y = 28.0
    for title, overrides in BATCHES:
        plan = batch_plan(load_config(list(overrides)), None)
        same = (plan.effective_batch, plan.statistic_batch, plan.norm_group) == (
            recipe.effective_batch,
            recipe.statistic_batch,
            recipe.norm_group,
        )
        drawing.text(16, y, title, "head")
        drawing.text(
            16,
            y + 20,
            f"effective {plan.effective_batch:,}, statistic {plan.statistic_batch:,}, BatchNorm {plan.norm_group}: "
            + ("the recipe's experiment" if same else "another experiment"),
            "soft",
        )
        y += 30
        assert plan.norm_group is not None
        groups = plan.batch_size // plan.norm_group
        for _ in range(plan.accumulate):
            for cell in range(plan.world_size * groups):
                rank = cell // groups
                drawing.rect(16 + cell * 34 + (3 if groups > 1 else 0) * rank, y, 32, 14, "c2" if same else "c1")
            y += 20
        y += 24
    drawing.text(16, y, "One row: what one SIGReg statistic sees. All rows together: one optimizer step.", "soft")
    drawing.text(16, y + 22, "One cell is one BatchNorm group of 96 clips.", "soft")
    return drawing


PICTURES: dict[str, Callable[[], Drawing]] = {
    "batching-modes.svg": batching_modes,
    "batching-attention.svg": batching_attention,
    "visibility.svg": visibility,
    "token-drop.svg": token_drop,
    "batch-sizes.svg": batch_sizes,
}


def pictures() -> dict[Path, str]:
    """What each file should hold."""
    return {FOLDER / name: draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
