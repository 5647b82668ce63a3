"""What the measurements should come to, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tables import NONE, number

Read = Callable[[Any], float]
ABSENT = (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError)
"""What reading a value out of a result raises when the value is not in it."""


class Aim(NamedTuple):
    """A value of one benchmark's JSON, and the bound on it."""

    benchmark: str
    what: str
    read: Read
    bound: float
    at_least: bool = False
    unit: str = ""

    def meets(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def said(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {number(self.bound)}{self.unit}"


def row(rows: Sequence[Mapping[str, Any]], **match: Any) -> Mapping[str, Any]:
    """The one row with these values."""
    found = [r for r in rows if all(r[key] == value for key, value in match.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows with {match}")
    return found[0]


def encoder(size: str, clips: int, key: str) -> Read:
    return lambda result: float(row(result["results"], size=size, clips=clips)[key])


def worst(key: str, *, named: Callable[[str], bool]) -> Read:
    """The largest value of ``key`` among the rows whose name ``named`` accepts."""
    return lambda result: float(max(r[key] for r in result["rows"] if named(r["name"])))


def packed_against(rivals: Sequence[str]) -> Read:
    """Packed's samples a second over the best rival's, on the mix where that is least."""

    def read(result: Any) -> float:
        speed = {(r["mix"], r["mode"]): r["samples_per_cpu_second"] for r in result["rows"]}
        mixes = {mix for mix, _ in speed}
        return float(min(speed[mix, "packed"] / max(speed[mix, rival] for rival in rivals) for mix in mixes))

    return read


def filled(key: str) -> Read:
    """The least ``key`` over the mixes, of filled microbatches handed out longest first."""
    return lambda result: float(min(r[key] for r in result["balance"] if r["policy"] == "fill, longest first"))


def ingested(key: str) -> Read:
    """``key`` of one worker on two files of 720p video."""
    return lambda result: float(row(row(result["rows"], name="720p, two files")["ingest"], workers=1)[key])


def checks_not_passed(result: Any) -> float:
    return float(sum(r["check"] and r["status"] in ("FAIL", "ERROR", "LATE") for r in result["rows"]))


AIMS = (
    Aim("startup", "`marey --help`", worst("median_s", named="--help".__eq__), 1.5, unit=" s"),
    Aim("startup", "`marey plan`", worst("median_s", named=lambda name: name.startswith("plan")), 1.5, unit=" s"),
    Aim(
        "startup",
        "`marey inspect` of a checkpoint beyond torch's import",
        worst("over_floor_s", named=lambda name: name.startswith("inspect")),
        1.0,
        unit=" s",
    ),
    Aim(
        "startup",
        "`marey train` to its first step beyond Lightning's import",
        worst("over_floor_s", named=lambda name: name.startswith("train")),
        3.0,
        unit=" s",
    ),
    Aim(
        "startup",
        "first step on a million rows (quick: 100,000)",
        worst("median_s", named=lambda name: " rows, " in name or " episodes, " in name),
        10.0,
        unit=" s",
    ),
    Aim("encoder_step", "ViT-Tiny step over its floor, 8 clips", encoder("vit_tiny", 8, "ratio"), 1.5),
    Aim("encoder_step", "ViT-B step over its floor, 4 clips", encoder("vit_base", 4, "ratio"), 1.2),
    Aim(
        "encoder_step",
        "ViT-B peak memory, 4 clips",
        lambda result: encoder("vit_base", 4, "peak_bytes")(result) / 1e9,
        2.7,
        unit=" GB",
    ),
    Aim(
        "loader",
        "a clip from the store, one core",
        lambda result: float(result["paths"]["store"]["cpu_ms_per_clip"]["whole"]) / 1e3,
        0.08,
        unit=" s",
    ),
    Aim(
        "reads",
        "random reads over the JPEG decoder alone",
        lambda r: float(r["store"]["of_decoder"]),
        0.9,
        at_least=True,
    ),
    Aim("ingest", "one worker over the decoder, clock", ingested("of_decoder_by_the_clock"), 0.8, at_least=True),
    Aim("ingest", "one worker over the decoder, CPU", ingested("of_decoder_by_cpu"), 0.8, at_least=True),
    Aim("ingest", "one worker over decoder, scaling and JPEG, CPU", ingested("of_floor_by_cpu"), 0.8, at_least=True),
    Aim("batching", "packed over the next best batched mode", packed_against(("padded", "bucket")), 1.0, at_least=True),
    Aim("batching", "packed over one sample at a time", packed_against(("loop",)), 0.97, at_least=True),
    Aim("packing", "filled microbatches, tokens over the budget", filled("full"), 0.99, at_least=True),
    Aim("packing", "FLOPs of 8 ranks, mean over busiest", filled("flops_mean_over_max"), 0.9, at_least=True),
    Aim("gpu", "checks on a GPU that did not pass", checks_not_passed, 0.0),
)


class Verdict(NamedTuple):
    """One line of the summary."""

    what: str
    aim: str
    measured: str
    verdict: str


def judge(aims: Sequence[Aim], results: Mapping[str, Any], reasons: Mapping[str, str]) -> list[Verdict]:
    """Each aim: met, not met, or missing and why.

    ``results`` holds the JSON of the benchmarks that ran, ``reasons`` why others have none.
    """
    verdicts = []
    for aim in aims:
        try:
            value = aim.read(results[aim.benchmark])
        except ABSENT:
            absent = "its JSON has no such value" if aim.benchmark in results else "was not run"
            why = f"{aim.benchmark}: {reasons.get(aim.benchmark, absent)}"
            verdicts.append(Verdict(aim.what, aim.said(), NONE, f"missing ({why})"))
            continue
        verdict = "met" if aim.meets(value) else "not met"
        verdicts.append(Verdict(aim.what, aim.said(), f"{number(value)}{aim.unit}", verdict))
    return verdicts
