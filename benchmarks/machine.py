"""What a measured number was measured on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

CANNOT_RUN = 77
"""Exit status of a benchmark that this machine lacks something for, as test harnesses have it."""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_machine() -> dict[str, Any]:
    """CPU, cores, load average over one minute, accelerator, versions. Plain values, ready for JSON."""
    import torch

    usable = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(usable(0)) if usable else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torchvision": _version("torchvision"),
        "av": _version("av"),
        "pylance": _version("pylance"),
    }


def peak_bytes() -> int:
    """The most memory that this program has held so far (bytes).

    Linux's getrusage would count the program that started this one too, before it became this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def cannot_run(reason: str) -> NoReturn:
    """End this benchmark with one line: what the machine lacks, and what to do. ``python -m benchmarks`` goes on."""
    print(f"cannot run here: {reason}", flush=True)
    raise SystemExit(CANNOT_RUN)


def remark(machine: dict[str, Any]) -> str | None:
    """A sentence when other work was going on at the same time, else None."""
    load, cores = machine["load_average"], machine["usable_cores"]
    if load <= 0.5:
        return None
    return f"load average {load} on {cores} cores before the measurement: other work ran beside it"
