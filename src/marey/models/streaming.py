"""A block-causal encoder fed frame by frame: the keys and values of earlier frames are kept, so that a new frame
costs one frame.

Under ``block_causal`` attention a patch sees its own and earlier frames and never [CLS], so the patch outputs of a
frame do not change when later frames arrive. [CLS] sees every patch; its query at every layer is computed anew for
each frame, one token, over the keys that are kept. So after frame k both are what the full forward pass of frames
0 .. k gives, within rounding.

Legend: B videos, W positions along time that are kept, P patch tokens of one position, H heads, d channels of a head,
D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from marey.core.errors import UserError
from marey.core.tokens import grid_positions, grid_shape, patchify
from marey.models.rope import rotary_tables, rotate, sincos_embedding
from marey.models.vit import Block, VisionTransformer


@dataclass(frozen=True)
class Streamed:
    """What n newly pushed positions along time gave."""

    patches: Tensor
    """``[B, n, P, D]``: the patch outputs of each new position, row by row."""
    summary: Tensor
    """``[B, n, D]``: the [CLS] output as of each new position: of all positions seen so far, or of the window."""


@dataclass
class _Cache:
    """One layer's memory ``[B, H, 1 + W*P, d]``: place 0 is [CLS] as of now, then the positions, in a ring."""

    keys: Tensor
    values: Tensor


class StreamingEncoder:
    """Feed it normalised frames in order; ask nothing twice.

    positions: how many positions along time (frames over the tubelet size) the encoder was trained on: its memory.
    sliding: what happens after that many. False: the next one is refused; ``reset`` starts a new video. True: each
    layer sees the newest ``positions`` alone, and they stand at 0 .. positions-1, so no token is ever placed where
    training placed none. Outputs of a layer are not computed again when the window moves, so what is deeper than one
    layer still carries traces of frames that left it; after the first ``positions`` the outputs are therefore not
    those of a forward pass over the window alone. With ``rotary`` positions the patch outputs are exactly those of one
    forward pass over the whole video in which a frame sees the ``positions`` newest frames up to itself; [CLS], which
    is not turned, stands at the window's start.

    Not for training: no gradients. Raises UserError for ``full`` attention, and for ``sliding`` without rotary
    positions, which are added to a token once and cannot move.
    """

    def __init__(self, encoder: VisionTransformer, *, positions: int, sliding: bool = False) -> None:
        if encoder.attn_mode != "block_causal":
            raise UserError(
                "an encoder with model.attn_mode=full cannot be streamed: every frame changes the outputs of all "
                "frames before it; give one trained with model.attn_mode=block_causal"
            )
        if positions < 1:
            raise UserError(f"a stream of {positions} positions holds nothing; give at least 1")
        if sliding and not encoder.use_rope:
            raise UserError(
                "a sliding window moves the frames it holds to earlier positions, which model.use_rope=false does not "
                "allow; stream at most the trained length and start again"
            )
        self.encoder, self.positions, self.sliding = encoder, positions, sliding
        self.seen = 0
        """Positions along time since the last ``reset``."""
        self._grid: tuple[int, int, int] | None = None  # (videos, rows, columns)
        self._caches: list[_Cache] = []

    def reset(self) -> None:
        """Forget everything: the next frame is a video's first."""
        self.seen = 0
        self._grid, self._caches = None, []

    @torch.no_grad()
    def push(self, video: Tensor) -> Streamed:
        """The next frames, normalised and floating, ``[B, 3, n * tubelet_size, H, W]``.

        Raises UserError as the encoder does, for frames of another size or number of videos than those before, and
        for more positions than the stream holds (nothing is then taken in).
        """
        encoder = self.encoder
        encoder._check(video)
        patch, tubelet = encoder.patch_size, encoder.tubelet_size
        new, rows, columns = grid_shape(*video.shape[2:], patch=patch, tubelet=tubelet)
        grid = (video.shape[0], rows, columns)
        if self._grid is not None and grid != self._grid:
            raise UserError(
                f"the stream holds {_sized(self._grid, patch)} and was given {_sized(grid, patch)}; keep the size, or "
                "call reset() for a new video"
            )
        if not self.sliding and self.seen + new > self.positions:
            raise UserError(
                f"the stream has seen {self.seen} of the {self.positions} positions that the encoder was trained on "
                f"and was given {new} more; call reset() for a new video, or make it with sliding=True"
            )
        dtype = encoder.cls_token.dtype
        tokens = encoder.patch_embed(patchify(video, patch=patch, tubelet=tubelet).to(dtype)).to(dtype)
        per = rows * columns
        if self._grid is None:
            self._grid = grid
            self._caches = [self._empty(tokens, per) for _ in encoder.blocks]
        steps = [self._step(tokens[:, i * per : (i + 1) * per]) for i in range(new)]
        return Streamed(
            torch.stack([step[:, 1:] for step in steps], dim=1), torch.stack([step[:, 0] for step in steps], dim=1)
        )

    def _empty(self, tokens: Tensor, per: int) -> _Cache:
        heads = self.encoder.num_heads
        shape = (tokens.shape[0], heads, 1 + self.positions * per, tokens.shape[2] // heads)
        return _Cache(tokens.new_empty(shape), tokens.new_empty(shape))

    def _step(self, tokens: Tensor) -> Tensor:
        """One position: embedded patches ``[B, P, D]`` -> outputs ``[B, 1+P, D]``, [CLS] first."""
        encoder = self.encoder
        assert self._grid is not None
        count, rows, columns = self._grid
        held = min(self.seen + 1, self.positions)
        place = self.seen % self.positions  # in the ring: over the oldest once it is full
        cells = grid_positions((1, rows, columns)).to(tokens.device)
        cells[:, 0] = held - 1
        if not encoder.use_rope:
            tokens = tokens + sincos_embedding(cells, width=encoder.embed_dim, dtype=tokens.dtype)
        x = torch.cat((encoder.cls_token.expand(count, 1, -1), tokens), dim=1)
        now = self._tables(cells) if encoder.use_rope else None
        kept = self._ring_tables(held, place) if encoder.use_rope and self.sliding else None
        for block, cache in zip(encoder.blocks, self._caches, strict=True):
            x = self._through(cast(Block, block), x, cache, held=held, place=place, now=now, kept=kept)
        self.seen += 1
        out: Tensor = encoder.norm(x)
        return out

    def _through(
        self,
        block: Block,
        x: Tensor,
        cache: _Cache,
        *,
        held: int,
        place: int,
        now: tuple[Tensor, Tensor] | None,
        kept: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """One block for one position ``[B, 1+P, D]``; ``cache`` takes it in.

        A window that moves keeps its keys as they are and turns them by where they stand now (``kept``); one that
        does not keeps them turned.
        """
        b, length, _ = x.shape
        per = length - 1
        qkv = block.attn.qkv(block.norm1(x)).view(b, length, 3, self.encoder.num_heads, -1)
        q, k, v = (part.contiguous() for part in qkv.permute(2, 0, 3, 1, 4).unbind(0))  # [B, H, 1+P, d]
        if now is not None:
            rotate(q, *now, out=q)
            if kept is None:
                rotate(k, *now, out=k)
        first = 1 + place * per
        for memory, new in ((cache.keys, k), (cache.values, v)):
            memory[:, :, 0] = new[:, :, 0]
            memory[:, :, first : first + per] = new[:, :, 1:]
        keys, values = (memory[:, :, : 1 + held * per] for memory in (cache.keys, cache.values))
        if kept is not None:
            keys = rotate(keys, *kept, out=torch.empty_like(keys))
        summary = scaled_dot_product_attention(q[:, :, :1], keys, values)  # [CLS] sees itself and every patch
        patches = scaled_dot_product_attention(q[:, :, 1:], keys[:, :, 1:], values[:, :, 1:])  # no patch sees [CLS]
        seen = torch.cat((summary, patches), dim=2).transpose(1, 2).flatten(2)
        x = x + block.attn.proj(seen)
        out: Tensor = x + block.mlp(block.norm2(x))
        return out

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary tables ``[1+n, d]`` of [CLS], which is not turned, and patches at ``positions`` ``[n, 3]``."""
        encoder = self.encoder
        return rotary_tables(
            pad(positions, (0, 0, 1, 0)),
            head_dim=encoder.embed_dim // encoder.num_heads,
            layout=encoder.rope_layout,
            dtype=encoder.cls_token.dtype,
        )

    def _ring_tables(self, held: int, place: int) -> tuple[Tensor, Tensor]:
        """Tables of all that is kept, in the ring's order: the newest, at ``place``, stands at ``held - 1``."""
        assert self._grid is not None
        _, rows, columns = self._grid
        positions = grid_positions((held, rows, columns)).to(self.encoder.cls_token.device)
        positions[:, 0] = (positions[:, 0] - place - 1) % held
        return self._tables(positions)


def _sized(grid: tuple[int, int, int], patch: int) -> str:
    count, rows, columns = grid
    return f"{count} video{'s' if count != 1 else ''} of {rows * patch} x {columns * patch} pixels"
