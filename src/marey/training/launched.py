"""Which rank of a run this process was launched as, by the environment alone: before Lightning, torch or a Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Each launcher's own, besides torchrun's RANK. NODE_RANK and LOCAL_RANK are Lightning's own launcher's: it gives each
# node's first process only the former and the processes that one starts both.
OTHER_VARIABLES = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "OMPI_COMM_WORLD_RANK",
)


def started_by_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether something other than this process starts the run's other ranks, or started this one."""
    return any(environment.get(name) for name in ("RANK", *OTHER_VARIABLES))


def launched_apart(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun or srun started for this run, each of which composes it by itself; 1 for none."""
    if "RANK" in environment:
        return int(environment.get("WORLD_SIZE", "1"))
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_PROCID" in environment else 1


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """0 in the one process that speaks, refuses and writes for the run; above 0 in every other.

    RANK is the global rank and settles it. Without it every variable that is set must be 0: a job's shell passes
    SLURM_PROCID=0 on to ranks that Lightning starts, which differ by LOCAL_RANK.
    """
    if "RANK" in environment:
        return int(environment["RANK"])
    return max((int(environment[name]) for name in OTHER_VARIABLES if environment.get(name)), default=0)
