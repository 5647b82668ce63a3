"""What a named run would take from this machine, by arithmetic from its configuration. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marey.config.causal import CausalConfig
from marey.config.runs import RunConfig
from marey.config.schema import EncoderConfig, SourceConfig
from marey.core.errors import UserError
from marey.doctor.data import DataRequest
from marey.training.batchplan import batch_plan
from marey.training.cost import step_cost
from marey.training.run import checkpoint_folder

READING_BYTES = 1 << 27
"""Decoded frames that a worker holds at once (``pixels.reading.READ_BYTES``)."""
PROGRAM_BYTES = 2e9
"""Host memory of one rank of a run whose model lies on an accelerator."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Of one node. Bytes."""

    ranks: int
    nodes: int
    workers: int
    """Loader workers per rank."""
    prefetch: int
    chunk_bytes: float
    """Of what a worker ships at once; 0 where the configuration does not tell."""
    reading_bytes: float
    host_bytes: float
    """All ranks' own memory: with the model where there is no accelerator."""
    checkpoint_dir: Path
    checkpoint_bytes: float | None
    """None where the configuration alone does not tell."""
    checkpoints: int | None
    """Kept at the end; None where the number of steps depends on the data."""

    @property
    def processes(self) -> int:
        """Ranks and their workers."""
        return self.ranks * (1 + self.workers)

    @property
    def shared_bytes(self) -> float:
        """What workers keep ready in shared memory, at the most."""
        return self.ranks * self.workers * self.prefetch * self.chunk_bytes


def needs_of(config: RunConfig, *, accelerators: int) -> Needs:
    """Of ``config`` on a node with this many accelerators."""
    ranks = _ranks(config.trainer.devices, accelerators)
    loader = config.loader
    chunk = host = 0.0
    checkpoint: float | None = None
    if isinstance(config, EncoderConfig):
        cost = step_cost(config)
        widening = 1 if config.loader.normalize_on_gpu else 4  # float32 patches in place of uint8
        chunk = (config.loader.micro_batch_size or config.loader.batch_size) * cost.bytes_shipped_per_clip * widening
        value = 8 if "64" in str(config.trainer.precision) else 4
        weights = cost.parameters + cost.projector_parameters
        checkpoint = value * (3 * weights + (cost.parameters if config.ema.enabled else 0))  # weights, two moments
        on_cpu = config.trainer.accelerator == "cpu" or (config.trainer.accelerator == "auto" and not accelerators)
        host = ranks * (PROGRAM_BYTES + (cost.memory_bytes if on_cpu else 0))
    return Needs(
        ranks=ranks,
        nodes=config.trainer.num_nodes,
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or 2,
        chunk_bytes=chunk,
        reading_bytes=READING_BYTES if isinstance(config, EncoderConfig) else 0.0,
        host_bytes=host or ranks * PROGRAM_BYTES,
        checkpoint_dir=checkpoint_folder(config),
        checkpoint_bytes=checkpoint,
        checkpoints=_kept(config, world=ranks * config.trainer.num_nodes),
    )


def _ranks(devices: int | str | list[int], accelerators: int) -> int:
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str):
        if "," in devices:
            return len([part for part in devices.split(",") if part.strip()])
        devices = int(devices) if devices.lstrip("-").isdecimal() else -1
    return devices if devices >= 1 else max(1, accelerators)


def _kept(config: RunConfig, *, world: int) -> int | None:
    """Files of the run that are there at its end; ``last.ckpt`` is a second name of one of them."""
    if config.checkpoint.save_top_k >= 0:
        return max(1, config.checkpoint.save_top_k)
    steps: int | None = config.trainer.max_steps if config.trainer.max_steps >= 0 else None
    published = config.data.num_episodes
    if isinstance(config, EncoderConfig) and published is not None:
        with contextlib.suppress(UserError):  # too few clips for a step is the run's to refuse
            steps = batch_plan(config, published * config.loader.clips_per_video, world_size=world).total_steps
    return None if steps is None else steps // config.checkpoint.every_n_train_steps + 1


def data_of(config: RunConfig, *, clips: int) -> list[DataRequest]:
    """What the run would read, training data before validation data."""
    if isinstance(config, CausalConfig):
        return latent_requests(config, _layouts(config), clips=clips)
    found: list[DataRequest] = []
    for data in (config.data.train, config.data.val):
        entries = [SourceConfig(path=data)] if isinstance(data, str) else data or []
        found += [encoder_request(config, entry, clips=clips) for entry in entries]
    return _once(found)


def encoder_request(config: EncoderConfig, source: SourceConfig, *, clips: int) -> DataRequest:
    """Clips of one source as an encoder's run would cut them."""
    return DataRequest(
        path=source.path,
        num_frames=config.model.num_frames,
        frame_stride=source.frame_stride or config.frame_stride,
        pad_short=(source.pad_short or config.data.pad_short) == "repeat",
        rate=config.data.video_rate,
        clips=clips,
        pixels=True,
    )


def latent_requests(config: CausalConfig, layouts: Mapping[str, str | None], *, clips: int) -> list[DataRequest]:
    """Windows of these manifests (path: declared layout), or frames of what holds frames, as the run would cut them."""
    data = config.data
    shortest = min(prefix + future for prefix, future in data.buckets)
    return [
        DataRequest(
            path=path,
            num_frames=1,  # frames are encoded first; whole episodes go in
            frame_stride=1,
            latent_frames=shortest,
            pad_short=False,
            rate=data.video_rate,
            clips=clips,
            layout=layout,
            checks_files=data.check_files,
            stops_on_bad_clip=data.on_bad_clip == "stop",
        )
        for path, layout in layouts.items()
    ]


def _layouts(config: CausalConfig) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for side in (config.data.train, config.data.sources, config.data.val):
        if isinstance(side, str):
            found[side] = None
        else:
            found.update({source.manifest: source.layout for source in side or []})
    return found


def _once(requests: list[DataRequest]) -> list[DataRequest]:
    return list({request.path: request for request in reversed(requests)}.values())[::-1]
