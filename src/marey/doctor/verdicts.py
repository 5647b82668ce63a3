"""What the facts about the software mean (``doctor.software`` gathers them)."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from marey.doctor.findings import Cost, Finding, fail, ok, warn
from marey.evaluation.wording import count, size

Facts = Mapping[str, Any]
GREY_ERROR = 8.0
"""Greys of 255 that lossy coding may be off by on flat pictures; rounding takes two."""
JPEG_ERROR = 12
BUSY = 0.1
"""Share of a GPU's memory that another program holds, from which it is mentioned as a warning."""
SLOW_S = 30.0
"""Seconds for imports, above which the disk they come from is worth a word."""
LOCAL = "install Python's packages on a local disk: every rank and loader worker imports them"
PLACE_OF_CUDA_BUILDS = "install a torch built for this machine (https://pytorch.org/get-started/locally)"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0]))


def check_packages(
    requirements: Iterable[str] | None = None, version_of: Callable[[str], str | None] = _installed
) -> Finding:
    """Everything Marey declares is installed, none older than its lower bound."""
    if requirements is None:
        requirements = importlib.metadata.requires("marey") or []
    bounds = [
        match.groups()
        for text in requirements
        if "extra ==" not in text and (match := re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", text))
    ]
    wrong = []
    for name, bound in bounds:
        version = version_of(name)
        if version is None:
            wrong.append(f"{name} is not installed")
        elif _numbers(version) < _numbers(bound):
            wrong.append(f"{name} {version} is older than {bound}")
    if wrong:
        return fail("packages", "; ".join(wrong), Cost.START, "install Marey again: pip install --upgrade marey")
    return ok("packages", f"all {len(bounds)} that Marey needs are there, none older than tested", Cost.START)


def check_torch(facts: Facts) -> Finding:
    """It computes; how long importing it takes."""
    built = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU alone"
    said = f"{facts['version']} imports in {facts['seconds']:.1f} s, built for {built}"
    if facts["seconds"] > SLOW_S:
        return warn("torch", said, Cost.START, LOCAL)
    return ok("torch", said, Cost.START)


def check_torchvision(facts: Facts) -> Finding:
    """It fits torch: its compiled operations run."""
    return ok("torchvision", f"{facts['version']} fits this torch", Cost.START)


def check_devices(facts: Facts) -> Finding:
    """Accelerators compute, in bfloat16, and are free."""
    cuda, driver = facts["cuda"], f", driver {facts['driver']}" if facts["driver"] else ""
    broken = [f"GPU {i} ({gpu['name']}): {gpu['problem']}" for i, gpu in enumerate(cuda) if gpu["problem"]]
    if broken:
        return fail("devices", "; ".join(broken) + driver, Cost.FIRST_BATCHES, PLACE_OF_CUDA_BUILDS)
    if not cuda and facts["cards"]:
        cards = count(facts["cards"], "NVIDIA card")
        if facts["built_for"] is None:
            return fail("devices", f"{cards}{driver}, and this torch is a CPU build", Cost.START, PLACE_OF_CUDA_BUILDS)
        why = facts["complaint"] or "torch does not say why"
        return fail(
            "devices",
            f"{cards}{driver}, none usable: {why}",
            Cost.START,
            f"update the driver to one for CUDA {facts['built_for']}, or install a torch built for an older CUDA",
        )
    if not cuda:
        if facts["mps"]:
            return ok("devices", "Apple GPU (mps)", Cost.START)
        return ok("devices", "no GPU: training runs on the CPU, fastest in trainer.precision=32-true", Cost.START)
    names = [f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free" for gpu in cuda]
    shown = f"{len(cuda)} x {names[0]}" if len(cuda) > 1 else names[0]
    said = f"{shown}{driver}"
    old = [f"GPU {i} ({gpu['name']})" for i, gpu in enumerate(cuda) if not gpu["bf16"]]
    if old:
        return warn(
            "devices",
            f"{said}; {', '.join(old)} cannot compute in bfloat16",
            Cost.THROUGHOUT,
            "set trainer.precision=16-mixed or 32-true",
        )
    held = [f"GPU {i}" for i, gpu in enumerate(cuda) if gpu["free"] < (1 - BUSY) * gpu["total"]]
    if held:
        return warn(
            "devices",
            f"{said}; another program holds memory of {', '.join(held)}",
            Cost.FIRST_BATCHES,
            "end the other program (nvidia-smi names it), or choose free ones with CUDA_VISIBLE_DEVICES",
        )
    return ok("devices", f"{said}, bfloat16 computes", Cost.START)


def check_decoder(facts: Facts, *, frames: int) -> Finding:
    """A clip came back whole and right."""
    ffmpeg = f" with FFmpeg {facts['ffmpeg']}" if facts["ffmpeg"] else ""
    said = f"PyAV {facts['version']}{ffmpeg}: {facts['frames']} of {frames} frames back from {facts['encoder']}"
    if facts["frames"] != frames or facts["worst"] > GREY_ERROR:
        said += f", grey off by {facts['worst']:.0f} of 255"
        return fail("decoder", said, Cost.FIRST_BATCHES, "install PyAV again: pip install --force-reinstall av")
    return ok("decoder", said, Cost.FIRST_BATCHES)


def check_torchcodec(facts: Facts | None) -> Finding:
    """Optional; worth a word where it is installed."""
    if facts is None:
        return ok("torchcodec", "not installed, and not needed: PyAV decodes", Cost.FIRST_BATCHES)
    return ok("torchcodec", f"{facts['version']} decodes", Cost.FIRST_BATCHES)


def torchcodec_is_broken(reason: str) -> Finding:
    """Installed and not usable, which a run survives."""
    return warn(
        "torchcodec",
        f"installed and not usable ({reason}); PyAV decodes",
        Cost.FIRST_BATCHES,
        "install FFmpeg's libraries and the TorchCodec of this torch, or take it away: pip uninstall torchcodec",
    )


def check_jpeg(facts: Facts) -> Finding:
    """A picture came back right."""
    said = f"simplejpeg {facts['version']} encodes and decodes"
    if facts["fault"] or facts["worst"] > JPEG_ERROR:
        wrong = facts["fault"] or f"is off by {facts['worst']} of 255"
        return fail(
            "jpeg",
            f"simplejpeg {facts['version']}: the picture that came back {wrong}",
            Cost.THROUGHOUT,
            "install it again: pip install --force-reinstall simplejpeg",
        )
    return ok("jpeg", said, Cost.THROUGHOUT)


def check_lance(facts: Facts) -> Finding:
    """The rows that were written came back."""
    said = f"Lance {facts['version']} writes and reads a table, imported in {facts['seconds']:.1f} s"
    if not facts["right"]:
        return fail(
            "lance",
            f"Lance {facts['version']}: the rows that came back are not those that were written",
            Cost.FIRST_BATCHES,
            "install it again: pip install --force-reinstall pylance",
        )
    return ok("lance", said, Cost.FIRST_BATCHES)


def check_worker(facts: Facts) -> Finding:
    """A loader worker started and handed a batch over."""
    said = f"a loader worker ({facts['method']}) starts in {facts['seconds']:.1f} s and holds {size(facts['bytes'])}"
    if not facts["right"]:
        return fail(
            "worker",
            "a loader worker handed over other values than it was asked for",
            Cost.FIRST_BATCHES,
            "set loader.num_workers=0 and report it",
        )
    if facts["seconds"] > SLOW_S:
        return warn("worker", said, Cost.FIRST_BATCHES, LOCAL)
    return ok("worker", said, Cost.FIRST_BATCHES)


def check_training(facts: Facts) -> Finding:
    """All of training imports together; how long that takes."""
    return ok(
        "lightning",
        f"{facts['version']} and all of `marey train` import in {facts['seconds']:.1f} s",
        Cost.START,
    )
