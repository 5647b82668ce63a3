"""Which window of which source comes next: a pure function of (seed, epoch, position), with exact shares.

All counting is integer arithmetic. A cycle of 64 epochs gets its draws by largest remainder; the draws of
each source are spread over the epochs of the cycle, then over fixed blocks of an epoch, so that no two
epochs and no two blocks differ by more than one draw of a source. Inside a block a keyed permutation mixes
the sources. So the number of draws of a source before any position is known without replay, and with it
which of the source's windows is next: they are visited through a keyed permutation of all of them, a fresh
one each time they are exhausted. Nothing is kept in memory but the last blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from marey.core.errors import UserError
from marey.core.keys import permutation
from marey.core.mixing import text_key
from marey.sampling.cipher import permute

Weights = Literal["by_draw", "by_size", "by_hours", "by_frames", "by_tokens"]
BLOCK = 1024
CYCLE = 64
_CACHED_BLOCKS = 64


class Drawn(NamedTuple):
    """k draws, by column.

    source: int32 ``[k]``. window: int64 ``[k]``, index within the source. turn: int64 ``[k]``, how many
    times the source's windows had been exhausted before (0: this window was not drawn before).
    """

    source: NDArray[np.int32]
    window: NDArray[np.int64]
    turn: NDArray[np.int64]


class Draws(Protocol):
    """A sequence of draws, epoch after epoch, any position by arithmetic."""

    epoch_draws: int

    def at(self, epoch: int, positions: NDArray[np.int64]) -> Drawn:
        """The draws at ``positions`` (int64 ``[k]``, each below ``epoch_draws``) of ``epoch``."""
        ...


def largest_remainder(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers that sum to ``total`` and lie within 1 of ``share * total``; ties go to the earlier share."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def draw_shares(
    names: Sequence[str], weights: Sequence[float], measures: Sequence[float], *, meaning: Weights
) -> list[Fraction]:
    """The share of draws of each source, exact, summing to 1.

    ``by_draw``: in proportion to the weight alone. Otherwise in proportion to weight times ``measures``:
    how many windows, hours, frames or tokens the source's windows hold; weights of 1 then draw every window
    equally often, every hour equally often, and so on. Weights are finite and not negative (the configuration
    says so). Raises UserError when nothing can be drawn.
    """
    assert all(0 <= weight < math.inf for weight in weights), weights
    products = [
        Fraction(w) if meaning == "by_draw" else Fraction(w) * Fraction(m)
        for w, m in zip(weights, measures, strict=True)
    ]
    for name, weight, product in zip(names, weights, products, strict=True):
        if weight > 0 and product <= 0:
            raise UserError(f"data.weights={meaning}: source {name} has nothing to weigh; give it weight 0.")
    total = sum(products)
    if total <= 0:
        raise UserError(f"data.sources: every weight is 0 ({', '.join(names)}); give one source a weight above 0.")
    return [product / total for product in products]


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """``sum((a*i + b) // m for i in range(n))`` for a, b >= 0, in a logarithmic number of steps."""
    total = 0
    while n > 0:
        total += (a // m) * n * (n - 1) // 2 + (b // m) * n
        a, b = a % m, b % m
        top = a * n + b
        n, b, m, a = top // m, top % m, a, m
        if m == 0:
            break
    return total


class Spread:
    """Whole numbers cut into ``parts`` parts of equal sum, each number's parts within 1 of each other.

    Part j of number s is ``floor((F_s + g j) / parts) - floor((F_{s-1} + g j) / parts)`` more than its
    quotient, where F are running sums of the remainders and g, prime to ``parts``, keeps the larger parts
    of one number apart.
    """

    def __init__(self, counts: Sequence[int], parts: int) -> None:
        assert sum(counts) % parts == 0, (counts, parts)
        self.parts = parts
        self._quotients = [count // parts for count in counts]
        self._running = [0]
        for count in counts:
            self._running.append(self._running[-1] + count % parts)
        self._stride = _coprime(parts)

    def before(self, j: int) -> list[int]:
        """The sum of each number's first j parts."""
        floors = [floor_sum(j, self.parts, self._stride, running) for running in self._running]
        return [q * j + floors[s + 1] - floors[s] for s, q in enumerate(self._quotients)]

    def part(self, j: int) -> list[int]:
        """Part j of each number."""
        floors = [(running + self._stride * j) // self.parts for running in self._running]
        return [q + floors[s + 1] - floors[s] for s, q in enumerate(self._quotients)]


def _coprime(parts: int) -> int:
    """A number prime to ``parts`` next to its golden section."""
    stride = max(1, round(parts * 0.6180339887498949))
    while math.gcd(stride, parts) != 1:
        stride += 1
    return stride


class _Block(NamedTuple):
    source: NDArray[np.int32]
    ordinal: NDArray[np.int64]
    """How many draws of the same source came before, counted from the first draw of epoch 0."""


class MixtureDraws:
    """Weighted draws from sources of ``sizes`` windows.

    ``shares`` sum to 1; a source of share 0 is never drawn and never waited for. ``epoch_draws`` None means
    the number of windows of all sources that can be drawn. Orders are keyed by source *name*: adding a
    source does not reorder the others.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shares: Sequence[Fraction],
        *,
        seed: int,
        epoch_draws: int | None = None,
        block: int = BLOCK,
    ) -> None:
        assert len(names) == len(sizes) == len(shares), (names, sizes, shares)
        assert sum(shares) == 1, shares
        for name, size, share in zip(names, sizes, shares, strict=True):
            if share > 0 and size < 1:
                raise UserError(
                    f"data.sources: source {name} has no usable window (its clips are shorter than the shortest "
                    "bucket, or all held out); change data.buckets, add clips or give it weight 0."
                )
        self.names, self.sizes, self.shares = tuple(names), tuple(sizes), tuple(shares)
        self.seed = seed
        usable = sum(size for size, share in zip(sizes, shares, strict=True) if share > 0)
        self.epoch_draws = usable if epoch_draws is None else epoch_draws
        self._block = block
        self._keys = [text_key(name) for name in names]
        self._cycle = largest_remainder(shares, self.epoch_draws * CYCLE)
        self._epochs = Spread(self._cycle, CYCLE)
        self._cache: OrderedDict[tuple[int, int], _Block] = OrderedDict()

    def quotas(self, epoch: int) -> list[int]:
        """How many draws of each source the epoch holds."""
        return self._epochs.part(epoch % CYCLE)

    def at(self, epoch: int, positions: NDArray[np.int64]) -> Drawn:
        """The draws at ``positions`` (int64 ``[k]``) of ``epoch``; each costs the same wherever it lies."""
        assert positions.size == 0 or (positions.min() >= 0 and positions.max() < self.epoch_draws), positions
        source = np.empty(len(positions), dtype=np.int32)
        ordinal = np.empty(len(positions), dtype=np.int64)
        blocks, places = np.divmod(positions, self._block)
        order = np.argsort(blocks, kind="stable")
        for run in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1) if len(order) else []:
            held = self._held(epoch, int(blocks[run[0]]))
            source[run] = held.source[places[run]]
            ordinal[run] = held.ordinal[places[run]]
        window = np.empty(len(positions), dtype=np.int64)
        turn = np.empty(len(positions), dtype=np.int64)
        for s in np.unique(source):
            mine = np.flatnonzero(source == s)
            turn[mine], place = np.divmod(ordinal[mine], self.sizes[s])
            window[mine] = permute(
                place,
                self.sizes[s],
                turns=turn[mine],
                seed=self.seed,
                purpose="window-order",
                parts=(self._keys[s],),
            )
        return Drawn(source, window, turn)

    def _held(self, epoch: int, block: int) -> _Block:
        key = (epoch, block)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        held = self._make(epoch, block)
        self._cache[key] = held
        if len(self._cache) > _CACHED_BLOCKS:
            self._cache.popitem(last=False)
        return held

    def _make(self, epoch: int, block: int) -> _Block:
        cycle, within = divmod(epoch, CYCLE)
        quotas = self._epochs.part(within)
        full, tail_size = divmod(self.epoch_draws, self._block)
        # The last, shorter block takes its fair part; what is left divides evenly over the full ones.
        tail = largest_remainder([Fraction(q, self.epoch_draws) for q in quotas], tail_size)
        before = [c * cycle + b for c, b in zip(self._cycle, self._epochs.before(within), strict=True)]
        counts = tail
        if full:
            blocks = Spread([q - t for q, t in zip(quotas, tail, strict=True)], full)
            before = [b + e for b, e in zip(before, blocks.before(min(block, full)), strict=True)]
            counts = blocks.part(block) if block < full else tail
        source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        ordinal = np.concatenate([np.arange(b, b + c, dtype=np.int64) for b, c in zip(before, counts, strict=True)])
        shuffled = source[permutation(len(source), self.seed, "mixture-block", epoch, block)]
        # Along the block each source's draws keep their own order.
        in_order = np.empty(len(source), dtype=np.int64)
        in_order[np.argsort(shuffled, kind="stable")] = ordinal
        return _Block(shuffled, in_order)


def spread_counts(sizes: Sequence[int], count: int) -> list[int]:
    """How many of ``count`` windows each source gives: in proportion to its windows, and one at least of each
    source that has any, where ``count`` allows it. No source gives more than it has.
    """
    total = sum(sizes)
    assert 0 <= count <= total, (count, sizes)
    if count == 0:
        return [0] * len(sizes)
    there = sum(size > 0 for size in sizes)
    least = [int(size > 0) if count >= there else 0 for size in sizes]
    rest, room = count - sum(least), total - sum(least)
    if rest == 0:
        return least
    shares = [Fraction(size - first, room) for size, first in zip(sizes, least, strict=True)]
    return [first + more for first, more in zip(least, largest_remainder(shares, rest), strict=True)]


class SpreadDraws:
    """``count`` windows in order, spread evenly over all sources and within each: what a limited validation reads.

    The same in every epoch, and whatever the number of ranks. ``counts``: how many of each source.
    """

    def __init__(self, sizes: Sequence[int], count: int) -> None:
        self.epoch_draws = count
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self.counts = spread_counts(sizes, count)
        self._ends = np.cumsum(np.asarray(self.counts, dtype=np.int64))

    def at(self, epoch: int, positions: NDArray[np.int64]) -> Drawn:  # noqa: ARG002
        """The draws at ``positions`` (int64 ``[k]``, each below ``count``)."""
        source = np.searchsorted(self._ends, positions, side="right")
        counts = np.asarray(self.counts, dtype=np.int64)[source]
        place = positions - (self._ends[source] - counts)
        # The middle of each of ``counts`` equal stretches; all of them, in order, where they are all taken.
        window = (2 * place + 1) * self._sizes[source] // (2 * counts)
        return Drawn(source.astype(np.int32), window, np.zeros(len(positions), dtype=np.int64))


class SequentialDraws:
    """Every window of every source once, in order: what a validation without a limit reads."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self.epoch_draws = int(self._ends[-1]) if len(self._ends) else 0

    def at(self, epoch: int, positions: NDArray[np.int64]) -> Drawn:  # noqa: ARG002
        """The draws at ``positions``, the same in every epoch."""
        source = np.searchsorted(self._ends, positions, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return Drawn(source.astype(np.int32), positions - starts[source], np.zeros(len(positions), dtype=np.int64))
