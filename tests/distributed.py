"""Run a function in several processes joined by gloo, and collect what each returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, fn: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(fn(rank, *args), f"{folder}/result-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world: int, tmp_path: Path, *args: Any) -> list[Any]:
    """``[fn(rank, *args) for rank in range(world)]``, each in its own process of one gloo group.

    ``fn`` lives at the top level of a test module; its result is made of tensors and plain values. An exception in
    any rank fails the test with that rank's traceback.
    """
    tmp_path.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_rank, (fn, world, str(tmp_path), args), nprocs=world, start_method="spawn")
    return [torch.load(tmp_path / f"result-{rank}.pt", weights_only=True) for rank in range(world)]
