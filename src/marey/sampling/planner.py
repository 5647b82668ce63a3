"""Which samples each rank sees in each micro-step, as a pure function of (seed, epoch, micro-step, rank).

The stream of draws is cut (or completed) to whole optimizer steps, then either read as it comes, micro-step m
taking positions [m*S, (m+1)*S) with S = world * batch and rank r the r-th block of them, or first planned
by canvas (``shape_grouping``), or into microbatches filled to a budget of tokens (``fill_tokens``). In mode
``bucket`` each rank then sorts pools of its own part by length. With a ``cost`` the samples of a micro-step are given
to its ranks longest first. Nothing depends on what was asked before, so any micro-step of any epoch can come first.
"""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.sampling.balance import deal_alike
from marey.sampling.canvases import by_canvas
from marey.sampling.draws import Draws
from marey.sampling.filling import FilledEpoch, fill_epoch
from marey.sampling.flops import SampleCost
from marey.sampling.pools import BucketOrder, emission_order, pool_batches, pool_steps
from marey.sampling.windows import Located, WindowTable

Ints = NDArray[np.int64]
Mode = Literal["strict", "padded", "bucket", "packed"]
Tail = Literal["drop", "repeat", "keep"]
_PLANS = 2
"""Epochs whose plans are kept: the loader may be an epoch ahead of the training loop."""


class PlannedBatch(NamedTuple):
    """The samples of one microbatch of one rank, by column; ``[b]`` each.

    position: int64, among the epoch's draws. repeat: int32, 0 or the k-th repetition. turn: int64, how
    often the window's source had been exhausted before. source: int32. window: int64. at: where each window
    lies.
    """

    position: Ints
    repeat: NDArray[np.int32]
    source: NDArray[np.int32]
    window: Ints
    turn: Ints
    at: Located


class EpochCounts(NamedTuple):
    """What becomes of an epoch's draws, over all ranks. Unless tail is keep, ``planned`` fills every counted batch."""

    drawn: int
    dropped: int
    repeated: int
    planned: int
    micro_steps: int


class _SpatialEpoch(NamedTuple):
    """Which draw fills each place of one epoch, ``[micro_steps, world, batch]`` each; see ``canvases.by_canvas``."""

    draws: Ints
    repeats: NDArray[np.int32]

    @property
    def micro_steps(self) -> int:
        return len(self.draws)

    @property
    def planned(self) -> int:
        return self.draws.size

    @property
    def nbytes(self) -> int:
        return self.draws.nbytes + self.repeats.nbytes

    def places(self, first: int, last: int, rank: int) -> tuple[Ints, NDArray[np.int32]]:
        return self.draws[first:last, rank].reshape(-1), self.repeats[first:last, rank].reshape(-1)


class MicrobatchPlanner:
    """Cuts draws into microbatches.

    ``tail``: what does not fill a whole optimizer step is dropped, completed by repeats, or kept as a
    shorter last micro-step (for validation; needs ``accumulate`` 1). ``shape_grouping`` gives every
    microbatch one canvas. ``fill_tokens``: microbatches of one canvas hold as many samples as fit into so many
    tokens, of ``patch`` latent cells a side, in place of ``batch``. ``cost``: like work for the ranks of a micro-step.
    Raises UserError for grouping, filling and costs without height and width, and for an epoch of draws that,
    dropping the rest, leaves no optimizer step (where microbatches are filled, once it is planned).
    """

    def __init__(
        self,
        draws: Draws,
        windows: WindowTable,
        *,
        seed: int,
        world: int,
        batch: int,
        accumulate: int = 1,
        tail: Tail = "drop",
        mode: Mode = "packed",
        pool_size: int = 0,
        bucket_order: BucketOrder = "shuffled",
        shape_grouping: bool = False,
        fill_tokens: int | None = None,
        patch: int = 1,
        cost: SampleCost | None = None,
    ) -> None:
        assert tail != "keep" or (accumulate == 1 and not shape_grouping and mode != "bucket"), tail
        assert (fill_tokens is None and cost is None) or (mode == "packed" and tail != "keep"), (mode, tail)
        self.draws, self.windows, self.seed = draws, windows, seed
        self.world, self.batch, self.accumulate, self.tail = world, batch, accumulate, tail
        # A batch of one sample is of one canvas anyway, so it needs no plan and no height and width.
        self.shape_grouping = shape_grouping and batch > 1 and fill_tokens is None
        self.fill_tokens, self._patch, self._cost = fill_tokens, patch, cost
        # Without grouping, a batch must be of one canvas anyway: pools then go by length alone.
        self._sorts_by_shape = shape_grouping
        if self.shape_grouping:
            windows.require_canvas(why="data.shape_bucketed_batching=true")
        if fill_tokens is not None:
            windows.require_canvas(why=f"data.batching.fill_tokens={fill_tokens}", instead="fill_tokens=null")
        if cost is not None:
            windows.require_canvas(why="data.batching.balance=longest_first", instead="balance=none")
        self.pooled = pool_steps(pool_size, batch) if mode == "bucket" else 1
        self._sorts = mode == "bucket"
        self._order: BucketOrder = bucket_order
        step = world * batch * accumulate
        whole = draws.epoch_draws // step * step
        if tail == "drop" and whole == 0 and fill_tokens is None:
            raise UserError(
                f"data.epoch_draws={draws.epoch_draws} does not fill one optimizer step of {step} samples "
                f"({world} ranks x data.train_batch_size={batch} x accumulate_grad_batches={accumulate}; null draws "
                "as many as there are windows); lower the batch, raise data.epoch_draws or set "
                "data.batching.drop_last_train=false."
            )
        self._cut = whole if tail == "drop" and fill_tokens is None else draws.epoch_draws
        self._plans: dict[int, _SpatialEpoch | FilledEpoch] = {}
        self._pool: dict[tuple[int, int, int], PlannedBatch] = {}
        self._dealt: dict[tuple[int, int], list[PlannedBatch]] = {}

    def twin(self) -> MicrobatchPlanner:
        """One that plans the same, sharing the plans of whole epochs, with other caches of its own."""
        twin = copy.copy(self)
        twin._pool, twin._dealt = {}, {}
        return twin

    @property
    def epochs_vary(self) -> bool:
        """Whether epochs are planned as a whole, and may differ in length."""
        return self.shape_grouping or self.fill_tokens is not None

    def counts(self, epoch: int) -> EpochCounts:
        """What is drawn, dropped, repeated and planned in ``epoch``."""
        drawn = self.draws.epoch_draws
        step = self.world * self.batch
        if self.epochs_vary:
            plan = self._planned(epoch)
            dropped = len(self.dropped(epoch))
            return EpochCounts(drawn, dropped, plan.planned - drawn + dropped, plan.planned, plan.micro_steps)
        if self.tail == "keep":
            steps = -(-self._cut // step)
        else:
            whole = step * self.accumulate
            steps = -(-self._cut // whole) * self.accumulate
        planned = self._cut if self.tail == "keep" else steps * step
        return EpochCounts(drawn, drawn - self._cut, planned - self._cut, planned, steps)

    def micro_steps(self, epoch: int) -> int:
        """Micro-steps of ``epoch``, the same on every rank; a multiple of ``accumulate``."""
        return self.counts(epoch).micro_steps

    @property
    def nbytes(self) -> int:
        """Bytes that the plan of the last whole epoch asked for holds (0 without one)."""
        return list(self._plans.values())[-1].nbytes if self._plans else 0

    def dropped(self, epoch: int = 0) -> Ints:
        """int64: the positions of ``epoch`` that no micro-step takes; only with ``fill_tokens`` do they vary."""
        if self.fill_tokens is not None:
            plan = self._planned(epoch)
            assert isinstance(plan, FilledEpoch)
            return plan.left
        return np.arange(self._cut, self.draws.epoch_draws, dtype=np.int64)

    def batch_at(self, epoch: int, micro_step: int, rank: int) -> PlannedBatch:
        """The microbatch of ``rank`` in ``micro_step`` of ``epoch``."""
        if self._cost is not None and self.fill_tokens is None and self.world > 1:
            return self._dealt_out(epoch, micro_step, self._cost)[rank]
        if not self._sorts:
            return self._described(epoch, *self._places(epoch, micro_step, micro_step + 1, rank))
        pool, place = divmod(micro_step, self.pooled)
        key = (epoch, pool, rank)
        if key not in self._pool:
            if len(self._pool) >= 2 * self.world:
                self._pool.clear()
            self._pool[key] = self._sorted_pool(epoch, pool, rank)
        held = self._pool[key]
        return _rows(held, slice(place * self.batch, (place + 1) * self.batch))

    def _dealt_out(self, epoch: int, micro_step: int, cost: SampleCost) -> list[PlannedBatch]:
        """The microbatches of all ranks: the same samples as without a cost, dealt out longest first."""
        key = (epoch, micro_step)
        if key not in self._dealt:
            if len(self._dealt) >= 2:
                self._dealt.clear()
            parts = [self._places(epoch, micro_step, micro_step + 1, rank) for rank in range(self.world)]
            held = self._described(epoch, *(np.concatenate(column) for column in zip(*parts, strict=True)))
            first = slice(None, None, self.batch)
            kinds = held.at.height[first] << 32 | held.at.width[first]
            dealt = deal_alike(cost.of(held.at), kinds, batch=self.batch, backwards=micro_step % 2 == 1)
            self._dealt[key] = [_rows(held, rows) for rows in dealt]
        return self._dealt[key]

    def _sorted_pool(self, epoch: int, pool: int, rank: int) -> PlannedBatch:
        first = pool * self.pooled
        last = min(first + self.pooled, self.micro_steps(epoch))
        held = self._described(epoch, *self._places(epoch, first, last, rank))
        at = held.at
        # One number for a window of one source: equal exactly for draws of the same window.
        identity = held.window * len(self.windows.sources) + held.source
        length = at.prefix + at.future
        keys = [at.height, at.width, length] if self._sorts_by_shape else [length]
        batches = pool_batches(keys, identity, batch=self.batch)
        order = emission_order(len(batches), self._order, seed=self.seed, epoch=epoch, pool=pool)
        return _rows(held, batches[order].reshape(-1))

    def _places(self, epoch: int, first: int, last: int, rank: int) -> tuple[Ints, NDArray[np.int32]]:
        """Positions and repeats of a rank's part of the micro-steps [first, last)."""
        step = self.world * self.batch
        if self.epochs_vary:
            return self._planned(epoch).places(first, last, rank)
        if self.tail == "keep":
            taken = [
                np.arange(m * step + rank * part // self.world, m * step + (rank + 1) * part // self.world)
                for m in range(first, last)
                if (part := min(step, self._cut - m * step)) > 0
            ]
            places = np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)
            return places, np.zeros(len(places), dtype=np.int32)
        steps = np.arange(first, last, dtype=np.int64)[:, None]
        places = (steps * step + rank * self.batch + np.arange(self.batch, dtype=np.int64)).reshape(-1)
        # Beyond the last draw the tail is completed by the epoch's draws from its beginning, again and again.
        return places % self._cut, (places // self._cut).astype(np.int32)

    def _planned(self, epoch: int) -> _SpatialEpoch | FilledEpoch:
        if epoch not in self._plans:
            while len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            drawn = self.draws.at(epoch, np.arange(self._cut, dtype=np.int64))
            at = self.windows.locate(drawn.source, drawn.window)
            del drawn
            self._plans[epoch] = self._spatial(at) if self.fill_tokens is None else self._filled(at, epoch)
        return self._plans[epoch]

    def _spatial(self, at: Located) -> _SpatialEpoch:
        canvas = at.height << 32 | at.width
        return _SpatialEpoch(*by_canvas(canvas, world=self.world, batch=self.batch, accumulate=self.accumulate))

    def _filled(self, at: Located, epoch: int) -> FilledEpoch:
        assert self.fill_tokens is not None
        assert self.tail != "keep"
        return fill_epoch(
            (at.prefix + at.future) * (at.height // self._patch) * (at.width // self._patch),
            at.height << 32 | at.width,
            budget=self.fill_tokens,
            world=self.world,
            accumulate=self.accumulate,
            tail=self.tail,
            seed=self.seed,
            epoch=epoch,
            cost=None if self._cost is None else self._cost.of(at),
        )

    def _described(self, epoch: int, positions: Ints, repeats: NDArray[np.int32]) -> PlannedBatch:
        drawn = self.draws.at(epoch, positions)
        at = self.windows.locate(drawn.source, drawn.window)
        return PlannedBatch(positions, repeats, drawn.source, drawn.window, drawn.turn, at)


def _rows(batch: PlannedBatch, rows: slice | Ints) -> PlannedBatch:
    return PlannedBatch(
        batch.position[rows],
        batch.repeat[rows],
        batch.source[rows],
        batch.window[rows],
        batch.turn[rows],
        Located(*(column[rows] for column in batch.at)),
    )
