"""One run: what is refused, what is said first, what is written, then the training itself."""

from __future__ import annotations

import os
from pathlib import Path

from marey.config import compose
from marey.config.causal import CausalConfig
from marey.config.runs import RunConfig
from marey.config.schema import describe
from marey.training.again import Again
from marey.training.attempts import check_records
from marey.training.batchplan import resolve_devices
from marey.training.compare import comparison_lines, restore_lines
from marey.training.folders import check_folder, check_writable
from marey.training.launched import launched_rank
from marey.training.lock import check_free
from marey.training.preflight import check_data, check_hardware

RUN_DIR_VARIABLE = "MAREY_RUN_DIR"
"""Set by the process a person started, so that the ranks it starts know the run's folder."""


def check(config: RunConfig, checkpoint_dir: Path | None) -> None:
    """Everything that can be refused before anything is loaded.

    ``checkpoint_dir`` (None: not known yet) is made and written to; nothing else is.

    Raises:
        UserError: the hardware, the data or the checkpoint folder cannot serve this run.
    """
    check_hardware(config.trainer)
    check_data(config)
    if checkpoint_dir is None:
        return
    # Weights alone start another run, which has no place among the first one's checkpoints.
    resume = None if config.resume.weights_only else config.resume.ckpt_path
    check_folder(checkpoint_dir, None if resume is None else Path(resume).expanduser())
    saves = config.trainer.enable_checkpointing is not False and not config.trainer.fast_dev_run
    if saves and launched_rank() == 0:
        check_free(checkpoint_dir, key="checkpoint.dirpath")
        check_writable(checkpoint_dir)


def check_run_folder(config: RunConfig, run_dir: Path) -> None:
    """Refuse a run folder that another run uses, or that holds another run's records. Makes nothing.

    Raises:
        UserError: naming the process, or the run.
    """
    if launched_rank() != 0 or not run_dir.is_dir():
        return
    check_free(run_dir, key="hydra.run.dir")
    resume, origin = config.resume, None
    if resume.ckpt_path is not None and not resume.weights_only and (run_dir / "receipt.json").exists():
        from marey.training.reading import origin_of  # deferred: it loads torch

        origin = origin_of(Path(resume.ckpt_path).expanduser())
        if origin is None:
            return  # what is wrong with the checkpoint is said where it is opened
    check_records(run_dir, describe(config), origin=origin)


def checkpoint_folder(config: RunConfig, *, base: Path | None = None) -> Path:
    """Absolute: a relative path resolves from ``base``, None: from where the run was launched."""
    return ((base or Path.cwd()) / Path(config.checkpoint.dirpath).expanduser()).resolve()


def execute(
    config: RunConfig,
    *,
    run_dir: Path,
    checkpoint_dir: Path,
    overrides: list[str],
    command: list[str],
    again: Again,
) -> None:
    """Run ``config``, leaving its records in ``run_dir``. ``again`` says how a person goes on with it.

    Raises:
        UserError: the request cannot be run here; see :func:`check`.
    """
    first = launched_rank() == 0
    if first:
        say(f"checkpoints   {checkpoint_dir}")
        say(f"run folder    {run_dir}")
        check(config, checkpoint_dir)
    differences: list[str] = []
    if first:
        differences = recipe_differences(config, overrides)
        announce(config, differences)
        check_free(run_dir, key="hydra.run.dir")
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
    _start_workers_server(config)
    from marey.training.fit import fit  # deferred: Lightning takes many seconds to import

    try:
        fit(
            config,
            run_dir=run_dir,
            checkpoint_dir=checkpoint_dir,
            differences=differences,
            command=command,
            again=again,
            say=say if first else _silent,
        )
    finally:
        if first:
            os.environ.pop(RUN_DIR_VARIABLE, None)


def _start_workers_server(config: RunConfig) -> None:
    """What loader workers are forked from imports torch while this process imports Lightning: seconds saved."""
    if not config.loader.num_workers:
        return
    from marey.training.workers import CLIP_MODULES, LATENT_MODULES, worker_context  # deferred: a plan has no workers

    worker_context(LATENT_MODULES if isinstance(config, CausalConfig) else CLIP_MODULES)


def recipe_differences(config: RunConfig, overrides: list[str]) -> list[str]:
    """Every value that is not the chosen recipe's, as ``key=value (recipe: value)``."""
    return compose.differences(describe(config), describe(compose.load_recipe(config, overrides)))


def announce(config: RunConfig, differences: list[str]) -> None:
    """Which experiment this is, in a few lines, before it starts."""
    world_size = resolve_devices(config.trainer) * config.trainer.num_nodes
    say(f"recipe        {config.recipe.name}: {config.recipe.source}")
    for line in comparison_lines(config, world_size=world_size):
        say(line)
    for line in restore_lines(config, world_size=world_size):
        say(f"    {line}")
    if differences:
        shown = "; ".join(differences[:6]) + (
            f"; and {len(differences) - 6} more in the receipt" if differences[6:] else ""
        )
        say(f"differs       {shown}")


def say(line: str) -> None:
    """A plain line for people, on stdout, at once."""
    print(line, flush=True)


def _silent(line: str) -> None:
    """What the other ranks say: nothing."""
