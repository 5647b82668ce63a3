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
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from marey.config import compose
from marey.core.errors import UserError
from marey.training.run import RUN_DIR_VARIABLE, check, execute


def run_application(words: list[str]) -> None:
    """Read ``words`` (the command line after the command) as Hydra does, and run what they ask for.

    Raises:
        UserError: the request is wrong; Hydra's own refusals are mapped to this.
    """
    original = sys.argv
    options = get_args_parser().parse_args(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting with 1
    if _starts_one_run(options):
        check(
            compose.load_run(
                options.overrides,
                config_name=options.config_name or compose.DEFAULT_CONFIG,
                config_dir=None if options.config_dir is None else Path(options.config_dir),
            )
        )
    refused: list[UserError] = []

    def task(composed: DictConfig) -> None:
        # Lightning starts the other local ranks from sys.argv, so it must be what the person typed.
        sys.argv = original
        try:
            plain = compose.to_plain(composed)
            hydra_config = HydraConfig.get()
            execute(
                compose.validate_run(plain),
                run_dir=Path(os.environ.get(RUN_DIR_VARIABLE) or hydra_config.runtime.output_dir).resolve(),
                overrides=list(hydra_config.overrides.task),
                command=list(original),
            )
        except UserError as error:
            refused.append(error)  # through Hydra it would arrive with a banner of Hydra's in front

    sys.argv = [original[0], *words]
    try:
        hydra.main(config_path="pkg://marey.conf", config_name=compose.DEFAULT_CONFIG, version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        name = options.config_name or compose.DEFAULT_CONFIG
        raise UserError(compose.explain(error, options.overrides, config_name=name)) from error
    finally:
        sys.argv = original
    if refused:
        raise refused[0]


def _starts_one_run(options: argparse.Namespace) -> bool:
    """A plain run from this package's configurations, in the process a person started."""
    shows = options.cfg or options.info or options.help or options.hydra_help or options.shell_completion
    return not (shows or options.multirun or options.experimental_rerun or options.config_path)
