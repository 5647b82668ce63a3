"""``receipt.json``: what experiment a run was. The schema is documented in docs/receipt.md.

Written when training starts, replaced whole at every checkpoint, closed at the end with how it ended.
"""

from __future__ import annotations

import os
import platform
import secrets
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from marey import __version__
from marey.config.schema import EncoderConfig, describe
from marey.core.files import write_json
from marey.training.attempts import Earlier
from marey.training.ema import describe_rule

if TYPE_CHECKING:
    from marey.training.kinds.base import Kind

FORMAT = 1
Ending = Literal["finished", "stopped on request", "time limit reached"]
Status = Literal["running", "finished", "stopped on request", "time limit reached", "refused", "failed"]
PACKAGES = ("torch", "torchvision", "lightning", "numpy", "av", "pylance", "pyarrow", "simplejpeg")


class Receipt:
    """The receipt of one run folder. Only rank 0 keeps one."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        self.content["updated"] = now()
        write_json(self.path, self.content)

    def close(self, status: Status, sentence: str) -> None:
        """Say how this sitting ended, for good."""
        ending = {"status": status, "ended": now(), "how_it_ended": sentence}
        self.content.update(ending)
        self.content["attempts"][-1].update(ending)
        if status == "finished":
            self.content["resume_command"] = None
        self.write()


def open_receipt(
    kind: Kind,
    *,
    run_dir: Path,
    checkpoint_dir: Path,
    differences: Sequence[str],
    command: Sequence[str],
    parameters: dict[str, int],
    checkpoint_keys: dict[str, str],
    resumed_from: dict[str, Any] | None,
    from_step: int,
    earlier: Earlier,
    resume_command: str | None,
) -> Receipt:
    """What is known when training starts. The order of the keys is the order in which a person wants to read them."""
    config = kind.config
    recipe = config.recipe
    code, host = code_facts(), host_facts()
    run_id, started = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", now()
    attempt = {
        "number": len(earlier.attempts) + 1,
        "run_id": run_id,
        "started": started,
        "ended": None,
        "status": "running",
        "how_it_ended": "",
        "from_step": from_step,
        "to_step": from_step,
        "world_size": kind.plan.world_size,
        "code": code,
        "host": host,
    }
    content: dict[str, Any] = {
        "format": FORMAT,
        "kind": kind.name,
        "run_id": run_id,
        "status": "running",
        "how_it_ended": "",
        "started": started,
        "updated": now(),
        "ended": None,
        "command": list(command),
        "resume_command": resume_command,
        "run_dir": str(run_dir),
        "checkpoint_dir": str(checkpoint_dir),
        "resumed_from": resumed_from,
        "attempts": [*earlier.attempts, attempt],
        "code": code,
        "host": host,
        "recipe": {
            "name": recipe.name,
            "source": recipe.source,
            "public": recipe.public,
            "not_public": recipe.not_public,
            "claims": recipe.claims,
        },
        "differences_from_recipe": list(differences),
        "differences_from_published_code": kind.published_differences(),
        "batch": kind.describe_batch(),
        "steps": kind.describe_steps(),
        "seed": config.seed,
        "precision": str(config.trainer.precision or "32-true"),
        "data": kind.describe_data(),
        "parameters": parameters,
        "ema": {**config.ema.model_dump(mode="json"), "rule": describe_rule(config.ema), "updates": 0},
        "consumed": {},
        "checkpoints": list(earlier.checkpoints),
        "checkpoint_keys": checkpoint_keys,
        "config": describe(config),
    }
    return Receipt(run_dir / "receipt.json", content)


WHOLE_VIEWS = "whole views are made, and most of their patches dropped"


def published_differences(config: EncoderConfig) -> list[dict[str, str]]:
    """Where this program departs from the published code on purpose, as this run has it.

    ``restore`` is the override that gives the published behaviour, empty where none does.
    """
    trainer, ema, loader = config.trainer, config.ema, config.loader
    rule = describe_rule(ema)
    return [
        {
            "what": "accelerator",
            "published": "gpu",
            "here": trainer.accelerator,
            "restore": "trainer.accelerator=gpu",
        },
        {
            "what": "weight average",
            "published": f"decay {ema.decay} at each update, one every {ema.update_every} steps",
            "here": rule,
            "restore": "ema.compensate=false",
        },
        {
            "what": "clips of one statistic batch",
            "published": "a plain shuffle of all clips",
            "here": "two clips of one episode are kept apart while the epoch allows it"
            if loader.episode_distinct
            else "a plain shuffle of all clips",
            "restore": "loader.episode_distinct=false",
        },
        {
            "what": "pixels of dropped patches",
            "published": WHOLE_VIEWS,
            "here": "never made; the mean that contrast needs is taken from a sample of each frame's pixels"
            if config.augmentation.sparse
            else WHOLE_VIEWS,
            "restore": "augmentation.sparse=false",
        },
        {
            "what": "SIGReg directions",
            "published": "drawn by each rank for itself",
            "here": "one set per micro-step, the same on all ranks",
            "restore": "",
        },
        {
            "what": "weight decay of cls_token",
            "published": "decays",
            "here": "does not decay" if config.optimizer.exclude_bias_norm else "decays, with everything else",
            "restore": "",
        },
    ]


def now() -> str:
    """UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code_facts() -> dict[str, Any]:
    """Marey's version and, when it runs from a checkout, the commit and whether files differ from it."""
    facts: dict[str, Any] = {"version": __version__, "commit": None, "modified": None}
    package = Path(__file__).resolve().parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return facts  # not in a checkout, or installed inside somebody else's
    facts["commit"] = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    facts["modified"] = None if changed is None else bool(changed)
    return facts


def host_facts() -> dict[str, Any]:
    """The machine and the software that numbers depend on."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version is not None},
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in ``folder``; None when there is no git, no checkout, or it says no."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
