"""TensorBoard by default, Weights & Biases when asked; ``metrics.csv`` is written whatever is chosen here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from marey.config.runs import RunConfig
from marey.core.errors import UserError


def build_loggers(config: RunConfig, run_dir: Path, *, after_step: int) -> list[Logger]:
    """The loggers of a run; none with ``trainer.logger=false``.

    after_step: TensorBoard hides what an earlier sitting in the folder logged after it.

    Raises:
        UserError: Weights & Biases is asked for and not installed.
    """
    if config.trainer.logger is False:
        return []
    hidden = after_step + 1 if after_step else None
    loggers: list[Logger] = [TensorBoardLogger(save_dir=run_dir, name="tensorboard", version="", purge_step=hidden)]
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
