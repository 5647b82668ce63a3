"""``marey doctor``: every check in turn, each printed as soon as it is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marey.core.errors import UserError
from marey.core.files import cache_dir
from marey.doctor import data, machine, places, software, verdicts
from marey.doctor.aside import Aside, Broken, Gone
from marey.doctor.data import Asks, DataRequest
from marey.doctor.findings import Cost, Finding, Report, Status, fail, refused

if TYPE_CHECKING:  # the configuration needs packages, whose absence is for a check to find
    from marey.doctor.needs import Needs
    from marey.doctor.run import NamedRun

IMPORT_S = 180.0
"""Seconds for importing something large; on a network disk the first import is slow."""
SOFTWARE = "marey.doctor.software"
REINSTALL = {
    "torch": "install torch and torchvision together: pip install --upgrade torch torchvision",
    "torchvision": "install the pair together: pip install --upgrade torch torchvision",
    "devices": "look at what the driver says (nvidia-smi)",
    "decoder": "install PyAV again: pip install --force-reinstall av",
    "jpeg": "install it again: pip install --force-reinstall simplejpeg",
    "lance": "install it again: pip install --force-reinstall pylance pyarrow",
    "worker": "set loader.num_workers=0 to train without workers",
    "lightning": "install it again: pip install --upgrade lightning",
}
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Data and overrides: a word ``key=value`` that names nothing on disk is an override."""
    overrides = [word for word in words if OVERRIDE.match(word) and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def doctor(
    words: Sequence[str], *, config_name: str | None, config_dir: Path | None, clips: int, limit_s: float
) -> None:
    """Print every finding, then what to do. ``words``: data and ``key=value`` of a run.

    ``clips``: how many of each data to read, for at most about ``limit_s`` seconds.

    Raises:
        UserError: at the end, where a check fails.
    """
    paths, overrides = split_words(words)
    visit = Visit(paths, clips=clips, limit_s=limit_s)
    with Report() as report, Aside() as aside:
        for name, check in visit.checks(aside, overrides, config_name=config_name, config_dir=config_dir):
            report.checking(name)
            for finding in shielded(name, check):
                report.add(finding)
        text = report.close()
    if any(finding.status is Status.FAIL for finding in report.findings):
        raise UserError(text)
    print(text)


Check = Callable[[], Iterable[Finding]]


def shielded(name: str, check: Check) -> Iterator[Finding]:
    """The check's findings; one that itself breaks is a finding too."""
    try:
        yield from check()
    except UserError as error:
        yield refused(name, str(error), Cost.START, remedy="see docs/doctor.md")
    except Exception as error:  # a machine odd enough to trip the check is what one wants to hear of
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        yield fail(name, f"this check itself broke ({reason})", Cost.START, "report it, with this line")


class Visit:
    """One examination: what is known so far, and the checks that use it."""

    def __init__(self, paths: Sequence[str], *, clips: int, limit_s: float) -> None:
        self._paths, self._clips, self._limit_s = list(paths), clips, limit_s
        self._run: NamedRun | None = None
        self._devices: verdicts.Facts | None = None
        self._worker_bytes: float | None = None
        self._requests: list[DataRequest] = []

    def checks(
        self, aside: Asks, overrides: Sequence[str], *, config_name: str | None, config_dir: Path | None
    ) -> Iterator[tuple[str, Check]]:
        """Name and check, quickest first, so that the first lines are there at once. To be run as they come."""
        yield "python", lambda: [machine.check_python()]
        yield "packages", lambda: [verdicts.check_packages()]
        named = bool(overrides) or config_name is not None or config_dir is not None
        if named:
            yield "run", partial(self._compose, overrides, config_name=config_name, config_dir=config_dir)
        here, wants = machine.look(), None if self._run is None else self._run.needs
        yield "cores", lambda: [machine.check_cores(here, wants)]
        yield "threads", lambda: [machine.check_threads(here, wants)]
        yield "shared memory", lambda: [machine.check_shared_memory(here.shm, wants)]
        yield "limits", lambda: [machine.check_limits(here, wants)]
        for place in self._places():
            yield place.what, partial(_place, place, wants)
        yield "decoder", lambda: _tried(aside, "decoder", "decoder_facts", _decoder)
        yield "torchcodec", lambda: _torchcodec(aside)
        yield "jpeg", lambda: _tried(aside, "jpeg", "jpeg_facts", verdicts.check_jpeg)
        yield "lance", lambda: _tried(aside, "lance", "lance_facts", verdicts.check_lance)
        yield "torch", lambda: _tried(aside, "torch", "torch_facts", verdicts.check_torch)
        yield "torchvision", lambda: _tried(aside, "torchvision", "torchvision_facts", verdicts.check_torchvision)
        yield "devices", lambda: _tried(aside, "devices", "device_facts", self._keep_devices)
        yield "worker", lambda: _tried(aside, "worker", "worker_facts", self._keep_worker, argument=IMPORT_S)
        yield "memory", lambda: [machine.check_memory(here, wants, worker_bytes=self._worker_bytes)]
        if self._run is not None:
            yield "run", partial(self._run.check, self._devices)
        yield "data", self._find_requests
        for request in self._requests:
            yield f"data {request.path}", partial(data.examine, request, aside, limit_s=self._limit_s)
        yield "lightning", lambda: _tried(aside, "lightning", "training_facts", verdicts.check_training)

    def _compose(
        self, overrides: Sequence[str], *, config_name: str | None, config_dir: Path | None
    ) -> Iterator[Finding]:
        from marey.doctor.run import compose

        try:
            self._run = compose(overrides, paths=self._paths, config_name=config_name, config_dir=config_dir)
        except UserError as error:
            yield refused("run", str(error), Cost.START, remedy="correct it on the command line")

    def _find_requests(self) -> list[Finding]:
        """Named data as the run would cut it (without one: as the encoder's default does), else the run's own."""
        if self._paths or self._run is not None:
            from marey.doctor.run import requests

            self._requests = requests(self._run, self._paths, clips=self._clips)
        return []

    def _places(self) -> list[places.Place]:
        found = [places.Place("run folders", Path.cwd() / "outputs", "set hydra.run.dir")]
        if self._run is not None:
            found.append(places.Place("checkpoints", self._run.needs.checkpoint_dir, "set checkpoint.dirpath"))
        return [*found, places.Place("cache", cache_dir(), "set MAREY_CACHE")]

    def _keep_devices(self, facts: verdicts.Facts) -> Finding:
        self._devices = facts
        return verdicts.check_devices(facts)

    def _keep_worker(self, facts: verdicts.Facts) -> Finding:
        self._worker_bytes = float(facts["bytes"])
        return verdicts.check_worker(facts)


def _place(place: places.Place, wants: Needs | None) -> list[Finding]:
    return [places.check_disk(place, places.look_at(place), wants)]


def _tried(
    aside: Asks, name: str, job: str, verdict: Callable[[Any], Finding], *, argument: Any = None
) -> Iterator[Finding]:
    cost = Cost.START if name in ("torch", "torchvision", "lightning") else Cost.FIRST_BATCHES
    try:
        yield verdict(aside.ask(f"{SOFTWARE}:{job}", argument, limit_s=IMPORT_S))
    except Broken as error:
        yield fail(name, str(error), cost, REINSTALL[name])
    except Gone as error:
        yield fail(name, f"trying it {error}", cost, REINSTALL[name])


def _decoder(facts: verdicts.Facts) -> Finding:
    return verdicts.check_decoder(facts, frames=software.CLIP_FRAMES)


def _torchcodec(aside: Asks) -> Iterator[Finding]:
    try:
        yield verdicts.check_torchcodec(aside.ask(f"{SOFTWARE}:torchcodec_facts", limit_s=IMPORT_S))
    except (Broken, Gone) as error:
        yield verdicts.torchcodec_is_broken(str(error))
