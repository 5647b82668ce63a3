"""The Hydra application behind ``marey train`` and ``python main.py``.

A request that cannot run is refused before Hydra makes a run folder: the words are composed, checked and held
against the machine and the data first, then handed to Hydra, which composes them again for the run itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from marey.config import compose
from marey.core.errors import UserError
from marey.training.again import Again, typed_program
from marey.training.launched import launched_apart, launched_rank
from marey.training.run import RUN_DIR_VARIABLE, check, check_run_folder, checkpoint_folder, execute, say
from marey.training.signals import StopRequest


def run_application(words: list[str]) -> None:
    """Read ``words`` (the command line after the command) as Hydra does, and run what they ask for.

    Raises:
        UserError: the request is wrong; Hydra's own refusals are mapped to this.
    """
    # Importing and opening data take many seconds: a signal then is a request too, kept for the run.
    with StopRequest(say if launched_rank() == 0 else _silent):
        _run_application(words)


def _run_application(words: list[str]) -> None:
    original = sys.argv
    options = get_args_parser().parse_args(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting with 1
    if _starts_one_run(options):
        job = compose.compose_job(
            options.overrides,
            config_name=options.config_name or compose.DEFAULT_CONFIG,
            config_dir=None if options.config_dir is None else Path(options.config_dir),
        )
        config = compose.validate_run(job.plain)
        ranks = launched_apart()
        if job.run_dir is None and ranks > 1 and RUN_DIR_VARIABLE not in os.environ:
            raise UserError(
                f"{ranks} processes were started for this run, and each would name its run folder by its own clock; "
                "give one that all of them share, as in hydra.run.dir=runs/NAME"
            )
        check(config, None if job.follows_run_dir else checkpoint_folder(config))
        if job.run_dir is not None:
            # Before Hydra starts, which replaces the .hydra of whatever run is there.
            check_run_folder(config, Path(job.run_dir).expanduser().resolve())
    refused: list[UserError] = []
    begun = False

    def task(composed: DictConfig) -> None:
        nonlocal begun
        begun = True
        # Lightning starts the other local ranks from sys.argv, so it must be what the person typed.
        sys.argv = original
        hydra_config = HydraConfig.get()
        # With hydra.job.chdir=true Hydra has moved into the run folder. Checkpoints follow it there; data, and a
        # checkpoint to resume from, are named from where the command was typed.
        base = Path.cwd()
        os.chdir(hydra_config.runtime.cwd)
        run_dir = Path(hydra_config.runtime.output_dir)
        if launched_rank() != 0:
            run_dir = Path(os.environ.get(RUN_DIR_VARIABLE, run_dir))
        try:
            config = compose.validate_run(compose.to_plain(composed))
            execute(
                config,
                run_dir=run_dir.resolve(),
                checkpoint_dir=checkpoint_folder(config, base=base),
                overrides=list(hydra_config.overrides.task),
                command=list(original),
                again=Again(
                    program=[*typed_program(original), *_config_words(options)],
                    overrides=_typed(hydra_config),
                    folder=Path.cwd(),
                    run_dir=run_dir.resolve(),
                ),
            )
        except UserError as error:
            refused.append(error)  # through Hydra it would arrive with a banner of Hydra's in front

    sys.argv = [original[0], *words]
    try:
        hydra.main(config_path="pkg://marey.conf", config_name=compose.DEFAULT_CONFIG, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        name = options.config_name or compose.DEFAULT_CONFIG
        raise UserError(compose.explain(error, options.overrides, config_name=name)) from error
    except OSError as error:
        if begun:
            raise
        raise UserError(
            f"the run folder cannot be made ({error.strerror or error}: {error.filename}); "
            "set hydra.run.dir to a folder that can be written to"
        ) from error
    finally:
        sys.argv = original
    if refused:
        raise refused[0]


def _config_words(options: argparse.Namespace) -> list[str]:
    """Which configuration was asked for, as it was typed."""
    named = {"--config-name": options.config_name, "--config-dir": options.config_dir}
    named["--config-path"] = options.config_path
    return [word for option, value in named.items() if value is not None for word in (option, str(value))]


def _typed(hydra_config: HydraConf) -> list[str]:
    """The overrides of this run, of a sweep's single one too."""
    return [*hydra_config.overrides.task, *hydra_config.overrides.hydra]


def _silent(_line: str) -> None:
    """What ranks other than 0 say."""


def _starts_one_run(options: argparse.Namespace) -> bool:
    """A plain run from this package's configurations, in the process a person started."""
    shows = options.cfg or options.info or options.help or options.hydra_help or options.shell_completion
    return not (shows or options.multirun or options.experimental_rerun or options.config_path)
