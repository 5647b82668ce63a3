"""Starting from a checkpoint: what may differ from the run that wrote it, and which weights are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from marey.config.schema import describe, with_later_keys
from marey.core.errors import UserError
from marey.training.changes import changed_keys, check_names, covers
from marey.training.ema import average_key
from marey.training.kinds.base import Kind
from marey.training.reading import read_checkpoint

# Changing these changes how a run is carried out or watched, not what it computes; each kind of run adds its own.
HARMLESS = (
    "checkpoint",
    "data.name",
    "data.val",
    "loader.num_workers",
    "loader.persistent_workers",
    "loader.pin_memory",
    "loader.prefetch_factor",
    "loader.timeout",
    "max_skipped_in_a_row",
    "max_skipped_steps",
    "on_nonfinite",
    "recipe",
    "resume",
    "trainer.check_val_every_n_epoch",
    "trainer.default_root_dir",
    "trainer.detect_anomaly",
    "trainer.enable_autolog_hparams",
    "trainer.enable_checkpointing",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.limit_predict_batches",
    "trainer.limit_test_batches",
    "trainer.limit_val_batches",
    "trainer.log_every_n_steps",
    "trainer.logger",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.min_epochs",
    "trainer.min_steps",
    "trainer.num_sanity_val_steps",
    "trainer.profiler",
    "trainer.val_check_interval",
    "wandb",
)


def load_weights(
    module: nn.Module,
    checkpoint: Mapping[str, Any],
    *,
    weights: Literal["online", "ema"],
    path: Path,
) -> None:
    """Load weights alone, every name and shape matching.

    ``ema`` takes the averaged tensors for what the average covers (the encoder) and the online ones for the rest.

    Raises:
        UserError: no average in the checkpoint, or weights of another model.
    """
    state = dict(checkpoint["state_dict"])
    if weights == "ema":
        key = average_key(checkpoint)
        if key is None:
            raise UserError(
                f"resume.weights=ema asks for averaged weights and {path} has none; set resume.weights=online"
            )
        state.update(checkpoint[key])
    _load(module, state, path=path)


def _load(module: nn.Module, state: Mapping[str, Any], *, path: Path) -> None:
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        detail = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"the weights in {path} do not fit this model ({detail}); use the model's settings "
            "that `marey inspect` shows for it"
        ) from error


def check_same_meaning(
    old: Mapping[str, Any], kind: Kind, *, path: Path, allow: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Refuse weights that fit by shape and were trained to mean something else.

    Returns the accepted changes, and the other ones of the model's settings, which weights do not depend on (clip
    length, resolution, token dropping), both for the receipt.

    Raises:
        UserError: listing every change that is not accepted.
    """
    changes = [
        (key, f"{key}: {before} -> {after}")
        for key, before, after in changed_keys(with_later_keys(old, type(kind.config)), describe(kind.config))
        if covers(kind.model_keys, key)
    ]
    refused = [(key, line) for key, line in changes if key in kind.meaning and not covers(allow, key)]
    if refused:
        raise UserError(
            f"the weights in {path} were trained for another model of the same shapes: "
            f"{'; '.join(line for _, line in refused)}; set these keys back, or accept the change with "
            f"'resume.allow_changes=[{','.join(key for key, _ in refused)}]'"
        )
    accepted = [line for key, line in changes if key in kind.meaning]
    return accepted, [line for key, line in changes if key not in kind.meaning]


def impossible(about: Mapping[str, Any], kind: Kind) -> str | None:
    """Why the state of a checkpoint cannot be carried on with, whatever is accepted; None when it can.

    ``about`` is the checkpoint's ``marey`` entry. Its place is a number of micro-steps within an epoch, after a
    whole number of optimizer steps.
    """
    plan = kind.plan
    statistic = about["statistic_batch"]
    if statistic is None:
        return "it holds imported weights and no run to go on with"
    if statistic != plan.statistic_batch:
        return (
            f"its place in the epoch counts micro-steps of {statistic} {kind.unit} on all ranks and this run's "
            f"have {plan.statistic_batch} (ranks x {kind.batch_key})"
        )
    accumulate = about["effective_batch"] // statistic
    if accumulate != plan.accumulate:
        return f"it accumulates {accumulate} micro-steps per optimizer step and this run {plan.accumulate}"
    per_epoch = about["receipt"]["steps"]["micro_steps_per_epoch"]
    if per_epoch != plan.micro_steps_per_epoch:
        return f"its epochs have {per_epoch} micro-steps and this run's have {plan.micro_steps_per_epoch}"
    if about["config"]["optimizer"]["exclude_bias_norm"] != kind.config.optimizer.exclude_bias_norm:
        return "optimizer.exclude_bias_norm sorts the parameters into other groups than its optimizer state has"
    return None


def check_same_experiment(
    old: Mapping[str, Any],
    kind: Kind,
    *,
    path: Path,
    allow: Sequence[str],
    same_batches: bool,
    reason: str | None = None,
) -> tuple[list[str], list[str]]:
    """Refuse an exact resume whose configuration would make it another experiment.

    ``allow`` names keys, or sections, whose change is accepted. ``same_batches``: effective batch, statistic batch
    and BatchNorm group are those of the checkpoint. ``reason`` says why accepting would not help (``impossible``).
    Returns the accepted changes and the harmless ones, for people and for the receipt.

    Raises:
        UserError: listing every change that is not accepted.
    """
    config = kind.config
    harmless = {*HARMLESS, *kind.harmless}
    if same_batches:
        harmless |= set(kind.partition)
    if config.scheduler.end_lr != config.optimizer.lr or config.weight_decay_scheduler.enabled:
        harmless -= {"trainer.max_epochs", "trainer.max_steps"}  # they say where the schedule ends
    before_it = with_later_keys(old, type(config))
    every = {key: (before, after) for key, before, after in changed_keys(before_it, describe(config))}
    changes = {key: pair for key, pair in every.items() if not covers(harmless, key)}
    refused = [f"{key}: {old} -> {new}" for key, (old, new) in changes.items() if not covers(allow, key)]
    if refused:
        keys = ",".join(key for key in changes if not covers(allow, key))
        way = f"accept the change with 'resume.allow_changes=[{keys}]'" if reason is None else _afresh(reason)
        raise UserError(
            f"resuming {path} exactly would change the experiment: {'; '.join(refused)}; set these keys back, or {way}"
        )
    # Which checkpoint a run goes on from is no change to list.
    noted = {key: pair for key, pair in every.items() if key not in changes and not covers(("resume",), key)}
    accepted, unasked = (
        [f"{key}: {before} -> {after}" for key, (before, after) in found.items()] for found in (changes, noted)
    )
    return accepted, unasked


def _afresh(reason: str) -> str:
    return f"start another run from its weights alone (resume.weights_only=true), since {reason}"


def check_same_data(
    old: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    *,
    facts: Sequence[str],
    path: Path,
    allow: Sequence[str],
    reason: str | None = None,
) -> None:
    """Refuse an exact resume on data that is no longer what it was. ``reason``: as in ``check_same_experiment``.

    Raises:
        UserError: naming the first source that differs, and how.
    """
    if covers(allow, "data.train"):
        return
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        for key in facts:
            if before.get(key) != after.get(key):
                accept = "accept the change with 'resume.allow_changes=[data.train]'"
                raise UserError(
                    f"resuming {path} exactly needs the data it was trained on, and source {index} "
                    f"({after.get('path')}) has changed: {key} was {before.get(key)} and is {after.get(key)}; "
                    f"restore the data, or {accept if reason is None else _afresh(reason)}"
                )


@dataclass(frozen=True)
class Start:
    """Where an exact resume goes on."""

    path: Path
    step: int
    """Optimizer steps completed."""
    epoch: int
    state: dict[str, Any]
    """``marey.resume`` of the checkpoint."""
    receipt: dict[str, Any]
    """The receipt as of the checkpoint: of the sitting that wrote it."""


def begin(kind: Kind, module: nn.Module) -> tuple[Start | None, dict[str, Any] | None]:
    """Do what ``resume.*`` asks: load weights into ``module`` now, or say where an exact resume goes on.

    Also returns what the receipt says of it.

    Raises:
        UserError: a checkpoint that cannot be read, does not fit, or would continue as another experiment.
    """
    config, plan = kind.config, kind.plan
    if config.resume.ckpt_path is None:
        return None, None
    path = Path(config.resume.ckpt_path).expanduser()
    exact, weights, allow = not config.resume.weights_only, config.resume.weights, config.resume.allow_changes
    if exact and weights == "ema":
        raise UserError(
            "resume.weights=ema starts a new run from averaged weights and resume.weights_only=false continues an "
            "old one; set resume.weights_only=true, or resume.weights=online"
        )
    checkpoint, notes = read_checkpoint(path, exact=exact)
    about = checkpoint["marey"]
    if about["kind"] != kind.name:
        raise UserError(
            f"resume.ckpt_path={path} holds a checkpoint of kind {about['kind']} and this run is of kind {kind.name}; "
            "give a checkpoint of the same objective"
        )
    said: dict[str, Any] = {
        "path": str(path.resolve()),
        "run_id": about["receipt"].get("run_id"),
        "step": about["step"],
        "epoch": about["epoch"],
        "micro_step": about["micro_step"],
        "exact": exact,
        "weights": weights,
        "allowed_changes": [],
        "harmless_changes": [],
        "notes": notes,
    }
    check_names(allow, describe(config), about["config"])
    if not exact:
        load_weights(module, checkpoint, weights=weights, path=path)
        said["allowed_changes"], other = check_same_meaning(about["config"], kind, path=path, allow=allow)
        said["notes"] += other
        return None, said
    reason = impossible(about, kind)
    same_batches = all(
        about[name] == getattr(plan, name) for name in ("effective_batch", "statistic_batch", "norm_group")
    )
    said["allowed_changes"], said["harmless_changes"] = check_same_experiment(
        about["config"], kind, path=path, allow=allow, same_batches=same_batches, reason=reason
    )
    check_same_data(
        about["receipt"]["data"]["train"],
        kind.describe_train(),
        facts=kind.data_facts,
        path=path,
        allow=allow,
        reason=reason,
    )
    if about["world_size"] != plan.world_size:
        problem = kind.partition_problem(old_world=about["world_size"])
        if problem is not None:
            raise UserError(f"resuming {path} exactly is impossible: {problem}")
    if reason is not None:
        raise UserError(f"resuming {path} exactly is impossible; {_afresh(reason)}")
    _load(module, checkpoint["state_dict"], path=path)  # Lightning will too, and would fail less readably
    if config.ema.enabled and average_key(checkpoint) is None:
        said["notes"].append("the checkpoint holds no weight average: it starts from the checkpoint's weights")
    if about["world_size"] != plan.world_size:
        said["notes"].append(
            f"written by {about['world_size']} ranks, continued by {plan.world_size}: "
            "equal within rounding, not bit by bit"
        )
    return Start(path, about["step"], about["epoch"], about["resume"], about["receipt"]), said
