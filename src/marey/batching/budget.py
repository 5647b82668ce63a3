"""A logical batch in chunks of bounded size: what one forward call holds, and nothing else, depends on them."""

from __future__ import annotations

from collections.abc import Sequence

from marey.core.errors import UserError
from marey.core.latents import Identity


def refuse_over_budget(identities: Sequence[Identity], tokens: Sequence[int], *, max_tokens: int) -> None:
    """Refuse the first sample that alone exceeds the budget, by name."""
    for identity, count in zip(identities, tokens, strict=True):
        if count > max_tokens:
            raise UserError(
                f"{identity} alone has {count} video tokens, more than data.batching.max_tokens={max_tokens}: raise "
                "it, or choose shorter buckets"
            )


def cut_by_tokens(tokens: Sequence[int], *, max_tokens: int | None, at_least: int = 1) -> list[tuple[int, int]]:
    """Consecutive ranges ``(start, stop)`` of samples, in order, each within ``max_tokens`` (None: no bound).

    A range is as long as the budget allows; then the longest ones are halved until there are ``at_least`` ranges, or
    one for each sample. No sample alone may exceed the budget.
    """
    assert tokens
    if max_tokens is None:
        ranges = [(0, len(tokens))]
    else:
        ranges, start, held = [], 0, 0
        for i, count in enumerate(tokens):
            if i > start and held + count > max_tokens:
                ranges.append((start, i))
                start, held = i, 0
            held += count
        ranges.append((start, len(tokens)))
    while len(ranges) < min(at_least, len(tokens)):
        widest = max(range(len(ranges)), key=lambda r: ranges[r][1] - ranges[r][0])
        start, stop = ranges[widest]
        middle = (start + stop + 1) // 2
        ranges[widest : widest + 1] = [(start, middle), (middle, stop)]
    return ranges
