"""Which clip comes at which position of an epoch, and which positions a rank takes.

Legend: n_s episodes of source s, K_s clips per episode and epoch, K = max K_s, B clips in a statistic batch.

The order is a pure function of (seed, epoch); any position is reached directly, so that resuming, prefetching
and partitioning replay nothing. An epoch holds every (source, episode) exactly K_s times, in K rounds:

* Round r takes, of source s, the episodes at ``[floor(r n_s K_s / K), floor((r+1) n_s K_s / K))`` of an
  endless repetition of one shuffled list of its episodes. A source with K_s = K gives all its episodes to
  every round; a lighter one gives an even share, so that the mixture is the same all through the epoch. A
  round never holds an episode twice.
* A round is a keyed permutation of its episodes.
* Windows ``[m B, (m+1) B)`` are what one statistic sees. Where a window straddles two rounds, the head of the
  later round is repaired: the episodes the window holds least often come first, and those displaced follow
  right behind the window. So no window of B clips holds an episode twice where rounds have B episodes or
  more; with fewer, repeats are as even as they can be.

Repair reads the end of the previous round. Rounds of two windows or more keep their end whatever was repaired
at their head, so one round back is enough; shorter ones are followed back to the last window that began with
a round.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marey.core.keys import permutation

CACHED_ROUNDS = 4
Ids = NDArray[np.int64]


class Draw(NamedTuple):
    """One clip to make. ``episode`` counts the episodes of ``source`` that are long enough."""

    epoch: int
    position: int
    source: int
    episode: int


class _Round(NamedTuple):
    ids: Ids
    """Episodes in final order, numbered through all sources."""
    open_window: Ids
    """What the window that is still open at the round's end holds so far."""


class EpochPlan:
    """The order of every epoch over ``sizes[s]`` usable episodes with ``clips_per_video[s]`` clips of each.

    ``statistic_batch`` is world size times clips per rank. ``episode_distinct=False`` is a plain shuffle of
    all clips (it holds one epoch's clips in memory; otherwise memory is a few rounds of episodes).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        clips_per_video: Sequence[int],
        *,
        seed: int,
        statistic_batch: int,
        episode_distinct: bool,
    ) -> None:
        assert len(sizes) == len(clips_per_video) > 0, (sizes, clips_per_video)
        assert all(n >= 1 for n in sizes), sizes
        assert all(k >= 1 for k in clips_per_video), clips_per_video
        assert statistic_batch >= 1, statistic_batch
        self.sizes = [int(n) for n in sizes]
        self.clips_per_video = [int(k) for k in clips_per_video]
        self.seed, self.statistic_batch, self.episode_distinct = seed, statistic_batch, episode_distinct
        self.rounds = max(self.clips_per_video)
        self._first = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        # One row per source: where its share of each round begins in its endless list.
        index = np.arange(self.rounds + 1, dtype=np.int64)
        self._share = np.stack(
            [index * (n * k) // self.rounds for n, k in zip(self.sizes, self.clips_per_video, strict=True)]
        )
        self._offsets = self._share.sum(0)
        self._cache: OrderedDict[tuple[int, int], _Round] = OrderedDict()
        self._plain: tuple[int, Ids] | None = None
        self._rings: tuple[int, list[Ids | None]] | None = None

    def __len__(self) -> int:
        """Clips of one epoch."""
        return int(self._offsets[-1])

    def draws(self, epoch: int, start: int, stop: int) -> list[Draw]:
        """The clips at positions ``start .. stop-1`` of ``epoch``."""
        ids = self._ids(epoch, start, stop)
        sources = np.searchsorted(self._first, ids, side="right") - 1
        episodes = ids - self._first[sources]
        return [
            Draw(epoch, position, source, episode)
            for position, source, episode in zip(range(start, stop), sources.tolist(), episodes.tolist(), strict=True)
        ]

    def same_episode_pairs(self, epoch: int, start: int, stop: int) -> int:
        """How many pairs of clips at positions ``start .. stop-1`` come from one episode."""
        _, counts = np.unique(self._ids(epoch, start, stop), return_counts=True)
        return int((counts * (counts - 1) // 2).sum())

    def _ids(self, epoch: int, start: int, stop: int) -> Ids:
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        if not self.episode_distinct:
            return self._plain_order(epoch)[start:stop]
        parts: list[Ids] = []
        index = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop:
            first = int(self._offsets[index])
            part = self._round(epoch, index).ids[start - first : stop - first]
            parts.append(part)
            start += len(part)
            index += 1
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _plain_order(self, epoch: int) -> Ids:
        if self._plain is None or self._plain[0] != epoch:
            clips = permutation(len(self), self.seed, "order", epoch)
            repeated = np.repeat(np.arange(self._first[-1]), np.repeat(self.clips_per_video, self.sizes))
            self._plain = (epoch, repeated[clips])
        return self._plain[1]

    def _ring(self, epoch: int, source: int) -> Ids | None:
        """A lighter source's shuffled list of episodes; None for a source that gives all to every round."""
        if self._rings is None or self._rings[0] != epoch:
            self._rings = (
                epoch,
                [
                    permutation(n, self.seed, "order-ring", epoch, s) if k < self.rounds else None
                    for s, (n, k) in enumerate(zip(self.sizes, self.clips_per_video, strict=True))
                ],
            )
        return self._rings[1][source]

    def _base(self, epoch: int, index: int) -> Ids:
        """Round ``index`` before repair."""
        members: list[Ids] = []
        for source, n in enumerate(self.sizes):
            ring = self._ring(epoch, source)
            if ring is None:
                members.append(np.arange(n, dtype=np.int64) + self._first[source])
            else:
                low, high = self._share[source, index : index + 2]
                members.append(ring[np.arange(low, high) % n] + self._first[source])
        joined = np.concatenate(members)
        return joined[permutation(len(joined), self.seed, "order", epoch, index)]

    def _size(self, index: int) -> int:
        return int(self._offsets[index + 1] - self._offsets[index])

    def _touched(self, index: int) -> int:
        """How many clips at the head of a round its repair may reorder."""
        inside = int(self._offsets[index]) % self.statistic_batch
        return min(self.statistic_batch, self._size(index)) if inside else 0

    def _repair(self, base: Ids, window: Ids) -> Ids:
        """``base``, its part inside the open ``window`` chosen among the episodes that window holds least."""
        need = self.statistic_batch - len(window)
        if len(window) == 0 or need >= len(base):
            return base
        # Among the first B clips at most len(window) repeat one of the window, so `need` others are there.
        head = base[: self.statistic_batch]
        held, counts = np.unique(window, return_counts=True)
        at = np.minimum(np.searchsorted(held, head), len(held) - 1)
        repeats = np.where(held[at] == head, counts[at], 0)
        chosen = np.sort(np.argsort(repeats, kind="stable")[:need])
        later = np.ones(len(head), dtype=bool)
        later[chosen] = False
        return np.concatenate([head[chosen], head[later], base[self.statistic_batch :]])

    def _before(self, epoch: int, index: int) -> Ids | None:
        """What the window open at the start of round ``index`` holds, if known without earlier repairs."""
        inside = int(self._offsets[index]) % self.statistic_batch
        if inside == 0:
            return np.empty(0, dtype=np.int64)
        known = self._cache.get((epoch, index - 1))
        if known is not None:
            return known.open_window
        if inside + self._touched(index - 1) <= self._size(index - 1):
            return self._base(epoch, index - 1)[-inside:]
        return None

    def _round(self, epoch: int, index: int) -> _Round:
        known = self._cache.get((epoch, index))
        if known is not None:
            self._cache.move_to_end((epoch, index))
            return known
        first = index
        while (window := self._before(epoch, first)) is None:
            first -= 1
        for current in range(first, index + 1):
            ids = self._repair(self._base(epoch, current), window)
            inside = int(self._offsets[current + 1]) % self.statistic_batch
            joined = np.concatenate([window, ids]) if inside > len(ids) else ids
            window = joined[len(joined) - inside :].copy()
            self._cache[epoch, current] = _Round(ids, window)
            if len(self._cache) > CACHED_ROUNDS:
                self._cache.popitem(last=False)
        return self._cache[epoch, index]


class EpochSteps(NamedTuple):
    """How an epoch divides into steps."""

    micro_steps: int
    """Micro-steps every rank takes: a multiple of the accumulation."""
    optimizer_steps: int
    dropped_clips: int
    """Clips at the epoch's end that fill no optimizer step."""


def micro_steps_per_epoch(clips: int, *, world: int, batch: int, accumulate: int) -> EpochSteps:
    """``floor(floor(clips / (world * batch)) / accumulate)`` optimizer steps; the rest is counted."""
    steps = clips // (world * batch) // accumulate
    micro_steps = steps * accumulate
    return EpochSteps(micro_steps, steps, clips - micro_steps * world * batch)


def rank_positions(micro_step_in_epoch: int, *, batch: int, world: int, rank: int) -> range:
    """The positions rank ``rank`` of ``world`` takes at a micro-step: its contiguous block of ``batch``."""
    assert 0 <= rank < world, (rank, world)
    first = (micro_step_in_epoch * world + rank) * batch
    return range(first, first + batch)


class MicroBatchSampler:
    """A batch sampler for ``torch.utils.data.DataLoader``: lists of ``micro_batch`` draws, in order.

    Covers micro-steps ``first_micro_step .. first_micro_step + micro_steps - 1`` of ``epoch``, for one rank;
    ``batch / micro_batch`` lists make one micro-step. Starting anywhere is arithmetic. ``move`` points the
    same sampler elsewhere, so that persistent workers outlive an epoch.
    """

    def __init__(
        self,
        plan: EpochPlan,
        *,
        epoch: int,
        first_micro_step: int,
        micro_steps: int,
        batch: int,
        micro_batch: int,
        world: int,
        rank: int,
    ) -> None:
        assert batch % micro_batch == 0, (batch, micro_batch)
        assert 0 <= rank < world, (rank, world)
        self.plan, self.batch, self.micro_batch, self.world, self.rank = plan, batch, micro_batch, world, rank
        self.move(epoch=epoch, first_micro_step=first_micro_step, micro_steps=micro_steps)

    def move(self, *, epoch: int, first_micro_step: int, micro_steps: int) -> None:
        """Cover other micro-steps from the next ``iter()`` on."""
        end = (first_micro_step + micro_steps) * self.world * self.batch
        assert first_micro_step >= 0, first_micro_step
        assert end <= len(self.plan), (first_micro_step, micro_steps, len(self.plan))
        self.epoch, self.first_micro_step, self.micro_steps = epoch, first_micro_step, micro_steps

    def __len__(self) -> int:
        """Lists it yields: chunks, not micro-steps."""
        return self.micro_steps * (self.batch // self.micro_batch)

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, first = self.epoch, self.first_micro_step
        for step in range(first, first + self.micro_steps):
            positions = rank_positions(step, batch=self.batch, world=self.world, rank=self.rank)
            draws = self.plan.draws(epoch, positions.start, positions.stop)
            for start in range(0, self.batch, self.micro_batch):
                yield draws[start : start + self.micro_batch]
