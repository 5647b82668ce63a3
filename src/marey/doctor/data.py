"""A sample of the data: what is asked for, reading it within a time limit, and what the facts mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from marey.core.errors import UserError
from marey.doctor.aside import Broken, Gone
from marey.doctor.findings import Cost, Finding, fail, ok, refused, warn
from marey.evaluation.wording import count, short

Facts = Mapping[str, Any]
LOAD_S = 180.0
"""Seconds that importing torch and opening an index may take; network disks are slow the first time."""
SHARE = 4
"""One clip gets at most this fraction of the time for all, so that one that hangs leaves time for others."""
LEAST_S = 5.0
"""Seconds any clip may take before its process is killed, however short the limit: a slow start is no hang."""
LABEL = 30
"""Characters of a path that are repeated in every line about it."""
NAMED = 3
SLOWER = 0.95
"""Of the asked rate: below it a video's frames are shown twice; rates such as 14.99 are rounding."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Data, and the clips a run would cut from it. Frames are stored frames, or latent frames of a manifest."""

    path: str
    num_frames: int
    frame_stride: int
    pad_short: bool
    """Shorter episodes repeat their last frame instead of being left out."""
    rate: float
    """Frames/s, for data that is video files."""
    clips: int
    """How many to read."""
    layout: str | None = None
    pixels: bool = False
    """The run that was named reads frames, and no latents."""
    latent_frames: int = 2
    """Of a manifest: the shortest window, prefix and future together."""
    checks_files: bool = True
    """Of a run on latents: ``data.check_files`` looks for every file at the start."""
    stops_on_bad_clip: bool = True
    """Of a run on latents: ``data.on_bad_clip``."""

    @property
    def label(self) -> str:
        """The path where it is short, else its last part."""
        path = self.path.rstrip("/")
        return path if len(path) <= LABEL else f".../{path.rpartition('/')[2]}"

    @property
    def span(self) -> int:
        """Frames from a clip's first to its last."""
        return (self.num_frames - 1) * self.frame_stride + 1


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One clip to read: of a video file (``video``), of a store (``store``, ``episode``, ``steps``) or a sidecar."""

    name: str
    video: bool = False
    footage: Any = None
    """Where a video's frames are, for one within something larger."""
    fault: str | None = None
    """Why a video cannot be read, where that is known before."""
    store: str | None = None
    episode: int = 0
    steps: tuple[int, ...] = ()
    latents: str | None = None
    expected: tuple[int, int | None, int | None] | None = None
    """Latent frames, rows and columns by the manifest."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What reading one clip came to. ``facts`` is empty where ``error`` says why it could not be read."""

    name: str
    facts: Facts
    error: str | None = None


class Asks(Protocol):
    """What ``Aside`` offers."""

    def ask(self, job: str, argument: Any = None, *, limit_s: float) -> Any:
        """The job's result."""
        ...


def examine(request: DataRequest, aside: Asks, *, limit_s: float) -> Iterator[Finding]:
    """Look at the data, then read clips of it for at most about ``limit_s`` seconds, as findings."""
    for finding in _examine(request, aside, limit_s=limit_s):
        yield replace(finding, subject=request.label)


def _examine(request: DataRequest, aside: Asks, *, limit_s: float) -> Iterator[Finding]:
    try:
        aside.ask("marey.doctor.sample:load", limit_s=LOAD_S)
        facts = aside.ask("marey.doctor.sample:look", request, limit_s=LOAD_S)
    except UserError as error:
        remedy = "see `marey inspect` and docs/data.md"
        sentence = str(error) if request.path in str(error) else f"{request.path}: {error}"
        yield refused("data", sentence, Cost.START, remedy=remedy)
        return
    except (Broken, Gone) as error:
        yield fail("data", f"{request.path}: opening it {error}", Cost.START, "look at the path and its disk")
        return
    yield check_found(request, facts)
    if facts["kind"] == "manifest":
        yield check_sidecars(request, facts)
    outcomes = read_sample(request, facts["picks"], aside, limit_s=limit_s)
    readable = any(outcome.error is None for outcome in outcomes)
    if facts["kind"] == "manifest" or (request.span > 1 and (readable or facts["kind"] == "store")):
        yield check_lengths(request, facts, outcomes)
    if facts["kind"] == "videos" and readable:
        yield check_rates(request, outcomes)
    if facts["picks"]:
        yield check_reading(request, facts, outcomes)


def read_sample(
    request: DataRequest,
    picks: Sequence[Pick],
    aside: Asks,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Read ``picks`` one after another until the time is used up; what hangs is killed, and the others go on.

    Only reading counts, not the start of another process after one was killed.
    """
    outcomes: list[Outcome] = []
    left, each = limit_s, limit_s / SHARE
    for pick in picks:
        if left <= 0:
            break
        start = clock()
        budget = min(left, each)
        try:
            # A decoder that works is stopped by its own clock; only one that hangs needs the kill.
            facts = aside.ask("marey.doctor.sample:read", (request, pick, budget / 2), limit_s=max(budget, LEAST_S))
            outcomes.append(Outcome(name=pick.name, facts=facts, error=facts["error"]))
            left -= clock() - start
        except (Broken, Gone, UserError) as error:
            left -= clock() - start
            outcomes.append(Outcome(name=pick.name, facts={}, error=f"{pick.name}: reading it {error}"))
            if isinstance(error, Gone) and left > 0:
                try:
                    aside.ask("marey.doctor.sample:load", limit_s=LOAD_S)
                except (Broken, Gone):
                    break
    return outcomes


def check_found(request: DataRequest, facts: Facts) -> Finding:
    """What was understood by the path."""
    said = f"{request.path}: "
    if facts["kind"] == "videos":
        return ok("data", f"{said}{count(facts['count'], 'video file')}", Cost.START)
    if facts["kind"] == "manifest":
        said += f"a manifest of {count(facts['count'], 'clip')}, {facts['frames']:,} latent frames"
        return ok("data", said, Cost.START)
    said += f"a frame store of {count(facts['count'], 'episode')}, {facts['frames']:,} frames"
    if facts["size"] is not None:
        said += " of {} x {}".format(*facts["size"])
    said += f" at {short(facts['rate'])} frames/s" if facts["rate"] else ", frames/s not recorded"
    return ok("data", said, Cost.START)


def check_sidecars(request: DataRequest, facts: Facts) -> Finding:
    """Every file that a manifest names is there."""
    missing, total = facts["missing"], facts["count"]
    cost = Cost.START if request.checks_files else Cost.LATE
    if not missing:
        return ok("sidecars", f"{request.label}: the files of all {count(total, 'row')} are there", cost)
    more = f" and {missing - len(facts['missing_named'])} more" if missing > len(facts["missing_named"]) else ""
    return fail(
        "sidecars",
        f"{request.label}: {missing:,} of {count(total, 'file')} missing: {', '.join(facts['missing_named'])}{more}",
        cost,
        "restore them, encode those clips again, or take their rows out of the manifest",
    )


def check_lengths(request: DataRequest, facts: Facts, outcomes: Sequence[Outcome] = ()) -> Finding:
    """How many episodes are shorter than a clip: of all, or of the video files that were read to the end."""
    name, span, remedy = "clip length", request.span, "set a smaller frame_stride or data.pad_short=repeat"
    of, longest_is_known = "stored", True
    if facts["kind"] == "videos":
        read = [outcome.facts for outcome in outcomes if outcome.error is None]
        steps = [one["steps"] for one in read if one["whole"]]
        longest_is_known = all(one["whole"] for one in read)
        too_short, total, longest, what = sum(n < span for n in steps), len(steps), max(steps, default=0), "video"
        if not steps:
            return ok(name, f"{request.label}: no video was read to its end in the time given", Cost.THROUGHOUT)
    else:
        too_short, total, longest, what = facts["short"], facts["count"], facts["longest"], "episode"
        if facts["kind"] == "manifest":
            span, what, of, remedy = request.latent_frames, "clip", "latent", "choose shorter data.buckets"
    clip = f"a clip's {span:,} stored frames" if of == "stored" else f"the shortest window's {span:,} latent frames"
    if not too_short:
        each = f"{request.label}: {'the' if total == 1 else f'all {total:,}'} {what}{'s' * (total > 1)}"
        read_to_end = " that were read to the end" if facts["kind"] == "videos" else ""
        return ok(name, f"{each}{read_to_end} {'holds' if total == 1 else 'hold'} {clip}", Cost.THROUGHOUT)
    said = f"{request.label}: {too_short:,} of {count(total, what)} shorter than {clip}"
    if request.pad_short and of == "stored":
        stiller = "set a smaller frame_stride, so that clips stand still less"
        return warn(name, f"{said}; their last frame is repeated", Cost.THROUGHOUT, stiller)
    if too_short == total and longest_is_known:
        return fail(name, f"{said}; the longest has {longest:,}", Cost.START, remedy)
    return warn(name, f"{said}; these are left out", Cost.THROUGHOUT, remedy)


def check_rates(request: DataRequest, outcomes: Sequence[Outcome]) -> Finding:
    """Videos slower than the rate at which frames are taken."""
    name = "frame rate"
    rates = [o.facts["rate"] for o in outcomes if o.error is None and o.facts["rate"] is not None]
    if not rates:
        return ok(name, f"{request.label}: no video tells its frame rate", Cost.THROUGHOUT)
    low, high = min(rates), max(rates)
    span = f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"
    said = f"{request.label}: {span} frames/s, read at {short(request.rate)}"
    slow = sum(rate < SLOWER * request.rate for rate in rates)
    if slow:
        return warn(
            name,
            f"{said}; {slow} of {count(len(rates), 'video')} slower, whose frames are shown more than once",
            Cost.THROUGHOUT,
            f"accept the repeats, or set data.video_rate={low:.4g} (ingest: --rate {low:.4g})",
        )
    return ok(name, said, Cost.THROUGHOUT)


def check_reading(request: DataRequest, facts: Facts, outcomes: Sequence[Outcome]) -> Finding:
    """Which clips of the sample could not be read, and how fast the others were."""
    name, kind = "reading", facts["kind"]
    bad = [outcome for outcome in outcomes if outcome.error is not None]
    good = [outcome for outcome in outcomes if outcome.error is None]
    what = {"videos": "video", "manifest": "sidecar", "store": "clip"}[kind]
    said = f"{request.label}: {len(good)} of {count(len(outcomes), what)} read"
    if len(outcomes) < len(facts["picks"]):
        said += f" (time was up before {len(facts['picks']) - len(outcomes)} more)"
    seconds = sum(outcome.facts["seconds"] for outcome in good)
    if good and seconds:
        rate = sum(outcome.facts["frames"] for outcome in good) / seconds
        clips = f" ({len(good) / seconds:,.0f} clips/s)" if kind == "store" and request.span > 1 else ""
        said += f", {rate:,.0f} {'latent ' if kind == 'manifest' else ''}frames/s{clips} in one process"
    if bad:
        named = "; ".join(str(outcome.error).rstrip(".") for outcome in bad[:NAMED])
        said += f": {named}{f'; and {len(bad) - NAMED} more' if len(bad) > NAMED else ''}"
        again = "encode them again" if kind == "manifest" else "restore them or name other data"
        if not good:
            return fail(name, said, Cost.FIRST_BATCHES, again)
        if kind == "manifest":
            if request.stops_on_bad_clip:
                return fail(name, said, Cost.LATE, f"{again}, or set data.on_bad_clip=replace")
            return warn(name, said, Cost.THROUGHOUT, again)
        rest = "`marey ingest` reads every file and reports each that it refuses; restore them, or take them out"
        return warn(name, said, Cost.THROUGHOUT, rest if kind == "videos" else "ingest those videos again")
    cut = [f"{outcome.name}: {outcome.facts['partial']}" for outcome in good if outcome.facts.get("partial")]
    channels = sorted({outcome.facts["channels"] for outcome in good if "channels" in outcome.facts})
    if len(channels) > 1:
        mixed = f"{said}; they have {' and '.join(map(str, channels))} channels"
        return fail(name, mixed, Cost.LATE, "encode them with one codec: a model takes one number of channels")
    if cut:
        return warn(name, f"{said}: {'; '.join(cut[:NAMED])}", Cost.THROUGHOUT, "fetch those files again")
    return ok(name, said, Cost.LATE)
