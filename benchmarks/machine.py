"""What a measured number was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


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


def remark(machine: dict[str, Any]) -> str | None:
    """A sentence when other work was going on at the same time, else None."""
    load, cores = machine["load_average"], machine["usable_cores"]
    if load <= 0.5:
        return None
    return f"load average {load} on {cores} cores before the measurement: other work ran beside it"
