"""TensorBoard by default, Weights & Biases when asked; ``metrics.csv`` is written whatever is chosen here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from marey.config.runs import RunConfig
from marey.core.errors import UserError


def build_loggers(config: RunConfig, run_dir: Path) -> list[Logger]:
    """The loggers of a run; none with ``trainer.logger=false``.

    Raises:
        UserError: Weights & Biases is asked for and not installed.
    """
    if config.trainer.logger is False:
        return []
    loggers: list[Logger] = [TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="")]
    if config.wandb.enabled:
        if find_spec("wandb") is None:
            raise UserError(
                "wandb.enabled=true needs the wandb package; install it with `pip install 'marey[wandb]'`, "
                "or set wandb.enabled=false"
            )
        loggers.append(
            WandbLogger(
                project=config.wandb.project or "marey",
                name=config.wandb.name,
                save_dir=run_dir,
                log_model=False,
            )
        )
    return loggers
