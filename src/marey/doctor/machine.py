"""What the machine allows: cores, threads, memory, shared memory, limits. Facts, then a check of each."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marey.doctor.findings import Cost, Finding, fail, ok, warn
from marey.doctor.places import Usage, usage_or_none
from marey.evaluation.wording import count, size

if TYPE_CHECKING:
    from marey.doctor.needs import Needs

SMALL_SHM = 1e9
"""Bytes of shared memory below which a run of unknown size is warned: Docker's default is 64 MB."""
SMALL_MEMORY = 4e9
"""Bytes; the program and one loader worker take about one and a half."""
FEW_FILES = 1024
"""Open files that a process may have; each tensor on its way from a worker holds one."""
FILES_PER_CHUNK = 10
BASE_FILES = 256


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the system says. Bytes; None where it does not say or there is no limit."""

    cores: int
    """That exist."""
    allowed: int
    """That this process may run on (affinity)."""
    quota: float | None
    """Cores' worth of time that the control group gives."""
    load: float | None
    """Processes that wanted a core over the last minute."""
    omp_threads: str | None
    omp_wait: str | None
    memory: float | None
    """Available now, within the control group's limit."""
    shm: Usage | None
    open_files: float
    processes: float
    locked: float
    infiniband: bool

    @property
    def usable(self) -> int:
        """Cores that this process can keep busy."""
        return max(1, self.allowed if self.quota is None else min(self.allowed, round(self.quota)))


def look() -> Machine:
    """This machine, now."""
    cores = os.cpu_count() or 1
    quota, memory_limit = cgroup_limits()
    available = _available_memory()
    known = [value for value in (available, memory_limit) if value is not None]
    infiniband = Path("/sys/class/infiniband")
    return Machine(
        cores=cores,
        allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        quota=quota,
        load=_load(),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        omp_wait=os.environ.get("OMP_WAIT_POLICY"),
        memory=min(known) if known else None,
        shm=usage_or_none(Path("/dev/shm")),
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        locked=_soft(resource.RLIMIT_MEMLOCK),
        infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
    )


def cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, float | None]:
    """(cores, bytes that are left) of the control groups this process is in, versions 1 and 2; None: no limit."""
    cores: list[float] = []
    bytes_left: list[float] = []
    for folder in _groups(root, own):
        quota = _text(folder / "cpu.max").split()
        if len(quota) == 2 and quota[0] != "max":
            cores.append(float(quota[0]) / float(quota[1]))
        old = _text(folder / "cpu.cfs_quota_us")
        if old and float(old) > 0:
            cores.append(float(old) / float(_text(folder / "cpu.cfs_period_us") or 100_000))
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _text(folder / limit)
            if most and most != "max" and float(most) < 2**60:  # version 1 writes "no limit" as a huge number
                bytes_left.append(max(0.0, float(most) - float(_text(folder / used) or 0)))
    return min(cores, default=None), min(bytes_left, default=None)


def _groups(root: Path, own: Path) -> list[Path]:
    """The folders whose limits hold: each group's, and those of the groups around it."""
    found: list[Path] = [root, root / "cpu", root / "memory"]
    for line in _text(own).splitlines():
        _, controllers, inner = [*line.split(":", 2), "", ""][:3]
        base = root / controllers if controllers else root
        parts = Path(inner.lstrip("/")).parts
        found += [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return list(dict.fromkeys(found))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _available_memory() -> float | None:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    with contextlib.suppress(ValueError, OSError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return None


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _soft(which: int) -> float:
    soft = resource.getrlimit(which)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft)


def check_python(
    version: tuple[int, ...] = sys.version_info[:3], *, bits: int = sys.maxsize.bit_length() + 1
) -> Finding:
    """3.11 or newer, 64 bits."""
    said = f"{'.'.join(map(str, version))} on {sys.platform}, {bits} bits ({sys.executable})"
    if version[:2] < (3, 11) or bits < 64:
        return fail("python", said, Cost.START, "install a 64-bit Python 3.11 or newer and Marey into it")
    return ok("python", said, Cost.START)


def check_cores(machine: Machine, needs: Needs | None = None) -> Finding:
    """Against the loader's workers, where a run is known."""
    said = f"{machine.usable} of {count(machine.cores, 'core')} usable"
    if machine.quota is not None and machine.quota < machine.allowed:
        said += f" (the control group gives {machine.quota:g} cores' time)"
    if needs is not None and needs.processes > machine.usable:
        said += f"; the run starts {needs.processes} processes here: {count(needs.ranks, 'rank')}, each with "
        said += count(needs.workers, "loader worker")
        fit = max(0, machine.usable // needs.ranks - 1)
        return warn("cores", said, Cost.THROUGHOUT, f"set loader.num_workers={fit}, or use a machine with more cores")
    if machine.load is not None and machine.load > machine.usable:
        return warn(
            "cores",
            f"{said}; load average {machine.load:.1f}: other programs keep them busy",
            Cost.THROUGHOUT,
            "wait for the other programs to end, or give the run cores of its own (taskset)",
        )
    return ok("cores", said, Cost.THROUGHOUT)


def check_threads(machine: Machine, needs: Needs | None = None) -> Finding:
    """OpenMP's threads in all ranks against the cores."""
    text, ranks = machine.omp_threads, 1 if needs is None else needs.ranks
    policy = f", OMP_WAIT_POLICY={machine.omp_wait}" if machine.omp_wait else ""
    if text is not None and not text.split(",")[0].strip().isdecimal():
        return warn(
            "threads",
            f"OMP_NUM_THREADS={text} is not a number",
            Cost.THROUGHOUT,
            f"export OMP_NUM_THREADS={max(1, machine.usable // ranks)}",
        )
    threads = machine.allowed if text is None else int(text.split(",")[0])
    said = f"{f'OMP_NUM_THREADS={text}' if text else f'OMP_NUM_THREADS is not set: {threads} a process'}{policy}"
    if threads > max(1, machine.usable // ranks):
        over = f" in each of {ranks} ranks" if ranks > 1 else ""
        return warn(
            "threads",
            f"{said}; {threads} threads{over} share {count(machine.usable, 'core')}",
            Cost.THROUGHOUT,
            f"export OMP_NUM_THREADS={max(1, machine.usable // ranks)} OMP_WAIT_POLICY=PASSIVE",
        )
    return ok("threads", said, Cost.THROUGHOUT)


def check_memory(machine: Machine, needs: Needs | None = None, *, worker_bytes: float | None = None) -> Finding:
    """Available memory against the loader's workers; ``worker_bytes``: what one holds by itself, as measured."""
    if machine.memory is None:
        return ok("memory", "the system does not say how much is available", Cost.FIRST_BATCHES)
    said = f"{size(machine.memory)} available"
    if needs is not None and worker_bytes is not None:
        each = worker_bytes + needs.reading_bytes
        wanted = needs.ranks * needs.workers * each + needs.shared_bytes + needs.host_bytes
        said += f"; loader and host take about {size(wanted)}"
        if wanted > machine.memory:
            return fail(
                "memory",
                said,
                Cost.FIRST_BATCHES,
                "lower loader.num_workers or the micro-batch, or use a machine with more memory",
            )
    elif machine.memory < SMALL_MEMORY:
        return warn("memory", said, Cost.FIRST_BATCHES, "close other programs, or train with loader.num_workers=0")
    return ok("memory", said, Cost.FIRST_BATCHES)


def check_shared_memory(shm: Usage | None, needs: Needs | None = None) -> Finding:
    """``/dev/shm`` against the batches that workers keep ready in it."""
    name, cost = "shared memory", Cost.FIRST_BATCHES
    if shm is None:
        return ok(name, "this system has no /dev/shm; workers hand over batches in another way", cost)
    said = f"{size(shm.free)} of {size(shm.total)} free in /dev/shm"
    bigger = "give the container more (docker run --shm-size=16g, or --ipc=host), or set loader.num_workers=0"
    if needs is not None and not needs.workers:
        return ok(name, f"{said}; the loader has no workers, which would use it", cost)
    if needs is not None and needs.chunk_bytes:
        wanted = needs.shared_bytes
        said += f"; the loader's workers keep up to {size(wanted)} there"
        if wanted > shm.free:
            return fail(name, said, cost, bigger)
        if wanted > shm.free / 2:
            return warn(name, said, cost, bigger)
    elif shm.free < SMALL_SHM:
        return warn(name, f"{said}, where loader workers keep their batches", cost, bigger)
    return ok(name, said, cost)


def check_limits(machine: Machine, needs: Needs | None = None) -> Finding:
    """Open files, processes, locked memory (where InfiniBand registers it)."""
    shown = {
        "open files": _limit(machine.open_files),
        "processes": _limit(machine.processes),
        "locked memory": "no limit" if machine.locked == float("inf") else size(machine.locked),
    }
    said = ", ".join(f"{name} {value}" for name, value in shown.items())
    files = FEW_FILES
    if needs is not None:
        files = max(FEW_FILES, BASE_FILES + needs.workers * (needs.prefetch + 1) * FILES_PER_CHUNK)
        if machine.processes < needs.processes + 64:
            return fail(
                "limits",
                f"{said}; the run needs {needs.processes} processes besides yours",
                Cost.FIRST_BATCHES,
                "raise it with `ulimit -u`, or lower loader.num_workers",
            )
    if machine.open_files < files:
        return warn(
            "limits",
            f"{said}; batches on their way from workers may hold {files:,} files open",
            Cost.LATE,
            f"run `ulimit -n {max(files, 65536)}` first (the administrator sets the most), or lower loader.num_workers",
        )
    if needs is not None and needs.nodes > 1 and machine.infiniband and machine.locked != float("inf"):
        return warn(
            "limits",
            f"{said}; InfiniBand between nodes has to lock memory",
            Cost.FIRST_BATCHES,
            "run `ulimit -l unlimited` first, on every node",
        )
    return ok("limits", said, Cost.LATE)


def _limit(value: float) -> str:
    return "no limit" if value == float("inf") else f"{value:,.0f}"
