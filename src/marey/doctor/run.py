"""The run that was named beside the data: composed, and held against what this machine is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marey.config.causal import CausalConfig
from marey.config.compose import DEFAULT_CONFIG, load_config, load_run
from marey.config.runs import RunConfig
from marey.config.schema import SourceConfig
from marey.core.commands import override
from marey.core.errors import UserError
from marey.doctor.data import DataRequest
from marey.doctor.findings import Cost, Finding, ok, refused
from marey.doctor.needs import Needs, data_of, encoder_request, latent_requests, needs_of
from marey.training.folders import check_folder
from marey.training.plan import DeviceFiles
from marey.training.preflight import Machine, check_hardware


class KnownMachine(Machine):
    """Accelerators as the process aside found them."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def cuda_devices(self) -> int:
        """Number of CUDA devices."""
        return len(self._facts["cuda"])

    def has_mps(self) -> bool:
        """Whether Apple's accelerator is usable."""
        return bool(self._facts["mps"])


@dataclass(frozen=True)
class NamedRun:
    """A configuration, and what it would take from this machine."""

    config: RunConfig
    needs: Needs

    def check(self, devices: Mapping[str, Any] | None) -> Iterator[Finding]:
        """What ``marey train`` would refuse at once: hardware (``devices``, where they are known), and another
        run's checkpoints in its folder. Its data is read by checks of its own."""
        config = self.config
        machine = DeviceFiles() if devices is None else KnownMachine(devices)
        resume = None if config.resume.weights_only else config.resume.ckpt_path
        questions: list[Callable[[], None]] = [
            lambda: check_hardware(config.trainer, machine=machine),
            lambda: check_folder(self.needs.checkpoint_dir, None if resume is None else Path(resume).expanduser()),
        ]
        refusals = 0
        for question in questions:
            try:
                question()
            except UserError as error:
                refusals += 1
                yield refused("run", str(error), Cost.START, remedy="see `marey plan`")
        if not refusals:
            yield ok("run", f"{config.recipe.name}: it composes, and this machine can start it", Cost.START)


def compose(
    overrides: Sequence[str], *, paths: Sequence[str], config_name: str | None, config_dir: Path | None
) -> NamedRun:
    """The run of ``marey train`` with these overrides, on the first of ``paths`` where they name no data.

    Raises UserError where they do not compose.
    """
    if paths and not any(re.match(r"\+*data(\.train|\.sources)?=", word) for word in overrides):
        overrides = [*overrides, override("data.train", paths[0])]
    config = load_run(overrides, config_name=config_name or DEFAULT_CONFIG, config_dir=config_dir)
    return NamedRun(config, needs_of(config, accelerators=DeviceFiles().cuda_devices()))


def requests(run: NamedRun | None, paths: Sequence[str], *, clips: int) -> list[DataRequest]:
    """``paths`` as the run would cut them (None: as the encoder's default does); without paths the run's own data."""
    if run is not None and not paths:
        return data_of(run.config, clips=clips)
    if run is not None and isinstance(run.config, CausalConfig):
        return latent_requests(run.config, dict.fromkeys(paths), clips=clips)
    config = load_config([]) if run is None else run.config
    assert not isinstance(config, CausalConfig)
    asked = [encoder_request(config, SourceConfig(path=path), clips=clips) for path in paths]
    return asked if run is not None else [replace(request, pixels=False) for request in asked]
