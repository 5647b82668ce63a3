"""Sharded data-parallel training: FSDP2 (``fully_shard``) over all ranks, through Lightning's ModelParallelStrategy.

Every rank keeps 1/W of each weight, gradient, optimizer moment and average; weights of one block at a time are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_sharded
from torch.optim import Optimizer

from marey.training.ema import average_key
from marey.training.module import TrainingModule
from marey.training.shards import load_folder, save_folder
from marey.training.watch import AgreedRefusalError

MESH = "data_parallel"
T = TypeVar("T")


class ShardedModule(TrainingModule):
    """Trains the objective sharded: the blocks of its models each by themselves, everything else together."""

    def configure_model(self) -> None:
        """Replace the weights by this rank's shards."""
        mesh = self._mesh()
        for child in self.children():
            for block in getattr(child, "blocks", ()):
                fully_shard(block, mesh=mesh)
        # Gathered weights never outlive a forward pass: whoever looks at the parameters sees the shards.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)

    def _mesh(self) -> DeviceMesh:
        assert self.device_mesh is not None
        return self.device_mesh[MESH]

    def forward(self, step: Callable[[], T]) -> T:
        """``step()`` with the weights at hand: they are gathered around a module's forward pass alone.

        The batch comes inside ``step``: arguments would be moved to the device, identities too.
        """
        return step()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """As ``TrainingModule`` has it."""
        training_step = super().training_step
        loss: Tensor = self(lambda: training_step(batch, batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """As ``TrainingModule`` has it."""
        validation_step = super().validation_step
        found: dict[str, Tensor] = self(lambda: validation_step(batch, batch_idx))
        return found

    def with_weights(self, look: Callable[[], T]) -> T:
        """As ``TrainingModule`` has it."""
        with torch.no_grad():
            found: T = self(look)
        return found


class ShardedStrategy(ModelParallelStrategy):
    """All ranks are one data-parallel group; state dictionaries stay sharded, checkpoints are folders."""

    def __init__(self, *, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer's state comes with the checkpoint's content, as everywhere else."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Sharded tensors by the names that the whole ones have."""
        return Strategy.lightning_module_state_dict(self)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """From sharded tensors."""
        Strategy.load_model_state_dict(self, checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As the optimizer has it: numbered by parameter, sharded like it."""
        return Strategy.optimizer_state(self, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """From sharded tensors."""
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """A folder, whole or not at all. Every rank calls it.

        Raises:
            UserError: on all ranks, when the disk refuses on any.
        """
        assert storage_options is None
        path = Path(filepath)
        try:
            save_folder(checkpoint, path)
        except OSError as error:
            raise AgreedRefusalError(
                f"the checkpoint {path} cannot be written ({error.strerror or error}); earlier checkpoints are "
                "untouched: free the disk or set checkpoint.dirpath, then resume from the newest"
            ) from error

    def load_checkpoint(
        self,
        checkpoint_path: str | Path,
        weights_only: bool | None = None,  # noqa: ARG002  # what would run code is never loaded
    ) -> dict[str, Any]:
        """A folder, each rank its own shards, whatever number of ranks wrote it; or a single file, cut into shards."""
        path = Path(checkpoint_path)
        if path.is_dir():
            return load_folder(path, make=self._empty)
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self._shard(content)
        return content

    def _empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        return empty_sharded(*size, dtype=dtype, device_mesh=self.device_mesh[MESH], placements=[Shard(0)])

    def _cut(self, whole: Tensor) -> Tensor:
        mesh = self.device_mesh[MESH]
        # Every rank has read the whole tensor: none needs to send it.
        return distribute_tensor(whole.to(self.root_device), mesh, [Shard(0)], src_data_rank=None)

    def _shard(self, content: dict[str, Any]) -> None:
        assert self.lightning_module is not None
        sharded = {name for name, value in self.lightning_module.state_dict().items() if isinstance(value, DTensor)}
        for key in filter(None, ("state_dict", average_key(content))):
            content[key] = {
                name: self._cut(value) if name in sharded else value for name, value in content[key].items()
            }
        for state in content["optimizer_states"]:
            state["state"] = {
                number: {
                    key: self._cut(value) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in moments.items()
                }
                for number, moments in state["state"].items()
            }
