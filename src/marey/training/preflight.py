"""What can be refused before anything is loaded: absent hardware, absent data, a launcher that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from marey.config.causal import CausalConfig
from marey.config.runs import RunConfig
from marey.config.schema import SourceConfig, TrainerConfig
from marey.core.errors import UserError
from marey.pixels.naming import is_there, split_part

ONE_PROCESS = "trainer.devices=1 trainer.num_nodes=1 trainer.strategy=auto"
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "NODE_RANK")


class Machine:
    """What torch can use here; asked only when it matters, since importing torch takes seconds."""

    def cuda_devices(self) -> int:
        """Number of CUDA devices (0 where there is none, or torch is a CPU build)."""
        import torch

        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def has_mps(self) -> bool:
        """Whether Apple's accelerator is usable."""
        import torch

        return torch.backends.mps.is_available()


def check_hardware(
    trainer: TrainerConfig, *, machine: Machine | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse what this machine cannot run as asked, naming the override that would work.

    Raises:
        UserError: an accelerator, a number of devices or of nodes that is not to be had here.
    """
    here = machine or Machine()
    asked = trainer.accelerator.lower()
    if asked in ("gpu", "cuda") and here.cuda_devices() == 0 and not (asked == "gpu" and here.has_mps()):
        raise UserError(
            f"trainer.accelerator={trainer.accelerator} asks for a GPU and torch finds none on this machine; "
            f"run it where there is one, or set trainer.accelerator=auto {ONE_PROCESS}"
        )
    if asked == "mps" and not here.has_mps():
        raise UserError(
            "trainer.accelerator=mps asks for an Apple GPU and torch finds none on this machine; "
            f"set trainer.accelerator=auto {ONE_PROCESS}"
        )
    devices = trainer.devices
    count = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) else 1
    if asked in ("auto", "gpu", "cuda"):
        _check_count(trainer, count, here)
    if trainer.num_nodes > 1 and not any(name in environment for name in LAUNCHER_VARIABLES):
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes} needs a launcher that starts every node (torchrun or SLURM) and "
            f"none started this process; launch it with one, or set trainer.num_nodes=1 "
            f"(`marey plan trainer.num_nodes=1` says what keeps the batch)"
        )


def _check_count(trainer: TrainerConfig, count: int, here: Machine) -> None:
    gpus = here.cuda_devices()
    if gpus == 0 and (count > 1 or trainer.num_nodes > 1):
        raise UserError(
            f"the run asks for {count} devices on {trainer.num_nodes} node{'s' if trainer.num_nodes > 1 else ''} "
            f"and this machine has no GPU; set {ONE_PROCESS} to run one process here "
            f"(another experiment: `marey plan {ONE_PROCESS}` says what differs), or launch it on such machines"
        )
    if 0 < gpus < count:
        raise UserError(
            f"trainer.devices={count} asks for {count} GPUs and this machine has {gpus}; set trainer.devices={gpus} "
            f"(`marey plan trainer.devices={gpus}` says what keeps the batch)"
        )


def check_data(config: RunConfig) -> None:
    """Refuse a training path that does not exist, saying how to build one.

    Raises:
        UserError: naming the path.
    """
    if isinstance(config, CausalConfig):
        _check_latents(config)
        return
    for path in source_paths(config.data.train):
        if not _is_named(path):
            building = path if path.endswith(".lance") else "OUT.lance"
            raise UserError(
                f"data.train={path} does not exist (looked in {Path.cwd()}); build it with "
                f"`marey ingest FOLDER_OF_VIDEOS {building}`, point data.train at a store or a folder of videos, "
                f"or try the small embedded set with data=demo"
            )


def _check_latents(config: CausalConfig) -> None:
    from marey.training.latents import named_paths

    for key, paths in named_paths(config.data).items():
        for path in paths:
            if not _is_named(path):
                raise UserError(
                    f"{key}={path} does not exist (looked in {Path.cwd()}); encode frames with `marey encode STORE "
                    f"OUT` and give OUT/manifest.csv, point {key} at a manifest or a frame store, or try the small "
                    "embedded set with data=demo"
                )


def _is_named(path: str) -> bool:
    """Whether ``path`` is the embedded set, a pattern, or there; a part of a dataset may stand behind a colon."""
    if path.startswith("demo:") or any(mark in path for mark in "*?[{"):
        return True
    return is_there(split_part(path)[0])


def source_paths(train: str | list[SourceConfig]) -> Iterator[str]:
    """The paths a ``data.train`` or ``data.val`` value names."""
    if isinstance(train, str):
        yield train
    else:
        yield from (source.path for source in train)
