"""What one run's steps add up to: batches, steps, epochs. Arithmetic alone, without torch.

Legend: S = world size x loader.batch_size, the clips of one micro-step on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from marey.config.causal import CausalConfig
from marey.config.schema import EncoderConfig, TrainerConfig
from marey.core.errors import UserError
from marey.sampling.order import micro_steps_per_epoch


@dataclass(frozen=True)
class BatchPlan:
    """A run's steps. Clips count all ranks; what depends on the data is None while none is known."""

    world_size: int
    batch_size: int
    """Clips per rank and micro-step."""
    accumulate: int
    """Micro-steps per optimizer step."""
    effective_batch: int
    """Clips per optimizer step."""
    statistic_batch: int
    """Clips that one SIGReg statistic sees: S."""
    norm_group: int | None
    """Clips that one BatchNorm group sees; None without BatchNorm."""
    clips: int | None
    """Clips of one epoch before anything is dropped."""
    micro_steps_per_epoch: int | None
    """A multiple of ``accumulate``."""
    steps_per_epoch: int | None
    """Optimizer steps of one epoch."""
    dropped_clips: int | None
    """Clips at an epoch's end that fill no optimizer step."""
    limited_clips: int | None
    """Clips of an epoch that trainer.limit_train_batches (or fast_dev_run, overfit_batches) leaves out."""
    total_steps: int | None
    """Optimizer steps of the whole run; None when only trainer.max_time (or nothing) ends it."""
    epochs: float | None
    """Epochs of the whole run."""
    mean_samples: float | None = None
    """Samples of a micro-step on all ranks, on average over the first epoch, where microbatches are filled to a budget
    of tokens and differ; ``statistic_batch`` is then the nearest whole number (the number of ranks where the data is
    not known), and ``effective_batch`` and ``batch_size`` follow from it."""

    @property
    def samples_per_step(self) -> float:
        """Samples of an optimizer step, on average."""
        return self.effective_batch if self.mean_samples is None else self.mean_samples * self.accumulate


def batch_plan(config: EncoderConfig, clips: int | None, *, world_size: int | None = None) -> BatchPlan:
    """The steps of ``config`` over ``clips`` clips per epoch (None: not known).

    ``world_size`` spares the look at the machine's devices where it is known already.

    Raises:
        UserError: fewer clips than one optimizer step takes, a limit that leaves none, or validation never reached.
    """
    trainer = config.trainer
    world = resolve_devices(trainer) * trainer.num_nodes if world_size is None else world_size
    batch, accumulate = config.loader.batch_size, config.accumulate_grad_batches
    statistic = world * batch
    micro_steps = steps = dropped = limited = total = None
    epochs = None
    if clips is not None:
        whole = micro_steps_per_epoch(clips, world=world, batch=batch, accumulate=accumulate)
        if whole.micro_steps == 0:
            raise UserError(_too_few(config, clips=clips, world=world))
        micro_steps = _limited(trainer, whole.micro_steps, accumulate=accumulate)
        check_validation_interval(trainer, micro_steps=micro_steps)
        steps = micro_steps // accumulate
        dropped = whole.dropped_clips
        limited = (whole.micro_steps - micro_steps) * statistic
        total = _total_steps(trainer, steps)
        epochs = None if total is None else total / steps
    elif trainer.max_steps >= 0:
        total = trainer.max_steps
    return BatchPlan(
        world_size=world,
        batch_size=batch,
        accumulate=accumulate,
        effective_batch=statistic * accumulate,
        statistic_batch=statistic,
        norm_group=config.projector.norm_group or batch,
        clips=clips,
        micro_steps_per_epoch=micro_steps,
        steps_per_epoch=steps,
        dropped_clips=dropped,
        limited_clips=limited,
        total_steps=total,
        epochs=epochs,
    )


def latent_plan(
    config: CausalConfig,
    *,
    draws: int | None,
    dropped: int,
    micro_steps: int | None,
    world_size: int,
    planned: int | None = None,
) -> BatchPlan:
    """The steps of a causal run whose first epoch has ``draws`` draws in ``micro_steps`` micro-steps (None: unknown).

    ``planned``: samples in those micro-steps, which say how large a filled microbatch is on average.

    Raises:
        UserError: a limit that leaves none, or validation never reached.
    """
    trainer, batch, accumulate = config.trainer, config.data.train_batch_size, config.accumulate_grad_batches
    statistic, mean = world_size * batch, None
    if config.data.batching.fill_tokens is not None:
        if planned and micro_steps:
            mean = planned / micro_steps
        statistic = max(world_size, round(mean or 0))
        batch = max(1, round(statistic / world_size))
    steps = total = limited = None
    epochs = None
    if micro_steps is not None:
        kept = _limited(trainer, micro_steps, accumulate=accumulate)
        check_validation_interval(trainer, micro_steps=kept)
        steps = kept // accumulate
        limited = (micro_steps - kept) * statistic if trainer.overfit_batches else 0
        total = _total_steps(trainer, steps)
        epochs = None if total is None else total * accumulate / micro_steps
        micro_steps = kept
    elif trainer.max_steps >= 0:
        total = trainer.max_steps
    return BatchPlan(
        world_size=world_size,
        batch_size=batch,
        accumulate=accumulate,
        effective_batch=statistic * accumulate,
        statistic_batch=statistic,
        norm_group=None,
        clips=draws,
        micro_steps_per_epoch=micro_steps,
        steps_per_epoch=steps,
        dropped_clips=dropped,
        limited_clips=limited,
        total_steps=total,
        epochs=epochs,
        mean_samples=mean,
    )


def resolve_devices(trainer: TrainerConfig) -> int:
    """Devices per node that ``trainer.devices`` means here; only "auto" and -1 ask torch what there is.

    Raises:
        UserError: a value that names no device.
    """
    devices = trainer.devices
    if isinstance(devices, list):
        count = len(devices)
    elif isinstance(devices, str) and "," in devices:
        count = len([part for part in devices.split(",") if part.strip()])
    elif devices in ("auto", -1, "-1"):
        count = _all_devices(trainer.accelerator)
    else:
        try:
            count = int(devices)
        except ValueError as error:
            raise UserError(
                f"trainer.devices={devices} is no number, list of devices or auto; set trainer.devices=1"
            ) from error
    if count < 1:
        raise UserError(f"trainer.devices={devices} leaves no device to run on; set trainer.devices=1")
    return count


def _all_devices(accelerator: str) -> int:
    if accelerator == "cpu":
        return 1
    import torch  # deferred: only "all there are" needs to look

    return max(torch.cuda.device_count(), 1) if torch.cuda.is_available() else 1


def fast_dev_steps(trainer: TrainerConfig) -> int | None:
    """Optimizer steps of a ``trainer.fast_dev_run`` (true is 1); None when it is off."""
    return int(trainer.fast_dev_run) or None


def _limited(trainer: TrainerConfig, whole: int, *, accumulate: int) -> int:
    """Micro-steps per epoch after the limits, cut to whole optimizer steps."""
    fast = fast_dev_steps(trainer)
    if fast is not None:
        return min(whole, fast * accumulate)
    for key in ("overfit_batches", "limit_train_batches"):
        limit = getattr(trainer, key)
        if limit is None or (key == "overfit_batches" and limit == 0):
            continue
        asked = int(whole * limit) if isinstance(limit, float) else min(whole, limit)
        cut = asked // accumulate * accumulate
        if cut < 1:
            raise UserError(
                f"trainer.{key}={limit} leaves {asked} of {whole} micro-steps per epoch, fewer than the "
                f"accumulate_grad_batches={accumulate} of one optimizer step; raise one or lower the other"
            )
        return min(cut, whole)
    return whole


def _total_steps(trainer: TrainerConfig, steps_per_epoch: int) -> int | None:
    fast = fast_dev_steps(trainer)
    if fast is not None:
        return min(fast, steps_per_epoch)
    bounds = []
    if trainer.max_steps >= 0:
        bounds.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * steps_per_epoch)
    return min(bounds) if bounds else None


def _too_few(config: EncoderConfig, *, clips: int, world: int) -> str:
    batch, accumulate = config.loader.batch_size, config.accumulate_grad_batches
    needed = world * batch * accumulate
    ranks = f"{world} rank{'s' if world > 1 else ''}"
    more = -(-needed * config.loader.clips_per_video // clips) if clips else None
    ways = (
        [f"loader.batch_size={clips // world}"]
        if clips >= world and accumulate == 1
        else ["a smaller loader.batch_size"]
    )
    if accumulate > 1:
        ways.append(f"a smaller accumulate_grad_batches (now {accumulate})")
    if more is not None:
        ways.append(f"loader.clips_per_video={more} (now {config.loader.clips_per_video})")
    ways.append("more video")
    return (
        f"the data gives {clips} clips per epoch and one optimizer step takes {needed} "
        f"({ranks} x loader.batch_size={batch} x accumulate_grad_batches={accumulate}); "
        f"use {', '.join(ways[:-1])} or {ways[-1]}"
    )


def validation_steps(config: EncoderConfig, clips: int, *, statistic_batch: int) -> int:
    """Micro-steps of one validation over ``clips`` clips, after ``trainer.limit_val_batches``.

    Raises:
        UserError: too few clips, or a limit that leaves none.
    """
    whole = clips // statistic_batch
    if whole < 1:
        raise UserError(
            f"the validation data gives {clips} clips and one micro-step takes {statistic_batch}; "
            "set trainer.limit_val_batches=0 or give more validation data"
        )
    return limited_validation(config.trainer, whole)


def limited_validation(trainer: TrainerConfig, whole: int) -> int:
    """``whole`` micro-steps of validation after ``trainer.limit_val_batches``.

    Raises:
        UserError: a limit that leaves none.
    """
    limit = trainer.limit_val_batches
    steps = whole if limit is None else int(whole * limit) if isinstance(limit, float) else min(whole, limit)
    if steps < 1:
        raise UserError(
            f"trainer.limit_val_batches={limit} leaves none of the {whole} micro-steps of validation; raise it, "
            "or set it to 0 for no validation"
        )
    return steps


def check_validation_interval(trainer: TrainerConfig, *, micro_steps: int) -> None:
    """Refuse a ``trainer.val_check_interval`` that an epoch of ``micro_steps`` never reaches.

    Raises:
        UserError: naming the keys that would make it possible.
    """
    interval = trainer.val_check_interval
    # Left null, check_val_every_n_epoch makes micro-steps count on through the epochs.
    if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None and interval > micro_steps:
        raise UserError(
            f"trainer.val_check_interval={interval} is more than the {micro_steps} micro-steps of an epoch; lower it, "
            "or set trainer.check_val_every_n_epoch=null to count on through the epochs"
        )


def max_seconds(trainer: TrainerConfig) -> float | None:
    """``trainer.max_time`` in seconds: ``DD:HH:MM:SS``, or ``{days, hours, minutes, seconds}``; None without one.

    Raises:
        UserError: neither of these.
    """
    limit = trainer.max_time
    if limit is None:
        return None
    try:
        if isinstance(limit, dict):
            return timedelta(**limit).total_seconds()
        days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"trainer.max_time={limit} is not a time; write days:hours:minutes:seconds, as in 00:12:00:00"
        ) from error
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
