"""Micro-steps in order, from any position: what the training loop iterates over.

A position is (epoch, micro-step within it). Nothing is drawn from a stream of random numbers and no state
lives in a worker, so starting in the middle of an epoch costs no more than starting at its head.
"""

from __future__ import annotations

import atexit
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from marey.config.schema import LoaderConfig
from marey.core.errors import UserError
from marey.core.tokens import ViewChunk
from marey.sampling.order import Draw, EpochPlan, MicroBatchSampler, rank_positions
from marey.training.workers import init_worker, worker_context

NAMED_FILES = 3
"""How many files a message about a stalled worker names."""
POLL_S = 2.0
"""Seconds between two looks at whether the workers still live, while none of them delivers."""


class ClipMaker(Protocol):
    """A dataset that turns a list of draws into what ``collate`` makes one chunk of."""

    def __getitems__(self, draws: Sequence[Draw], /) -> Any:
        """What ``collate`` takes."""
        ...


class _Endless:
    """Lists of ``micro_batch`` draws from one position on, epoch after epoch."""

    def __init__(self, loader: MicroStepLoader, epoch: int, micro_step: int) -> None:
        self._loader, self._epoch, self._first = loader, epoch, micro_step

    def __iter__(self) -> Iterator[list[Draw]]:
        first = self._first
        for epoch in itertools.count(self._epoch):
            yield from self._loader.draws_from(epoch, first)
            first = 0


class MicroStepLoader:
    """Yields ``list[ViewChunk]``: one rank's micro-step, in chunks of ``micro_batch`` clips.

    ``iter()`` goes on where the last one stopped, to the end of the epoch. Workers prefetch across epochs
    (with ``persistent_workers``). ``waited`` counts the seconds spent waiting for data.

    ``fixed_epoch`` repeats the draws of epoch 0 in every epoch; ``from_the_top`` makes every ``iter()`` start there
    (validation: what is measured must not depend on how much was looked at before). ``describe`` names the file
    behind a draw.
    """

    def __init__(
        self,
        dataset: ClipMaker,
        plan: EpochPlan,
        *,
        config: LoaderConfig,
        micro_steps: int,
        world: int,
        rank: int,
        collate: Callable[[Any], ViewChunk],
        describe: Callable[[Draw], str],
        pin_memory: bool,
        fixed_epoch: bool = False,
        from_the_top: bool = False,
    ) -> None:
        self.plan, self.micro_steps, self.world, self.rank = plan, micro_steps, world, rank
        self.batch = config.batch_size
        self.micro_batch = config.micro_batch_size or config.batch_size
        self.waited = 0.0
        self._dataset, self._config, self._collate, self._describe = dataset, config, collate, describe
        self._pin_memory, self._fixed_epoch, self._from_the_top = pin_memory, fixed_epoch, from_the_top
        self._next = (0, 0)
        self._stream: Iterator[ViewChunk] | None = None
        self._stuck = False

    def __len__(self) -> int:
        """Micro-steps of one epoch."""
        return self.micro_steps

    def start_at(self, *, epoch: int, micro_step: int) -> None:
        """Deliver this micro-step next. A micro-step past the epoch's end means the next epoch's first."""
        self.close()
        self._next = (epoch, micro_step) if micro_step < self.micro_steps else (epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """The position of the next micro-step to deliver."""
        epoch, micro_step = self._next
        return {"epoch": epoch, "micro_step": micro_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved position."""
        self.start_at(epoch=state["epoch"], micro_step=state["micro_step"])

    def draws_from(self, epoch: int, first_micro_step: int) -> MicroBatchSampler:
        """The draws of this rank from ``first_micro_step`` to the end of ``epoch``."""
        return MicroBatchSampler(
            self.plan,
            epoch=0 if self._fixed_epoch else epoch,
            first_micro_step=first_micro_step,
            micro_steps=self.micro_steps - first_micro_step,
            batch=self.batch,
            micro_batch=self.micro_batch,
            world=self.world,
            rank=self.rank,
        )

    def __iter__(self) -> Iterator[list[ViewChunk]]:
        if self._from_the_top and self._next[1] != 0:
            self.start_at(epoch=0, micro_step=0)
        if self._stream is None:
            self._stream = self._open()
        return self._epoch()

    def _epoch(self) -> Iterator[list[ViewChunk]]:
        epoch, first = self._next
        for micro_step in range(first, self.micro_steps):
            started = time.perf_counter()
            chunks = [self._take(micro_step, chunk) for chunk in range(self.batch // self.micro_batch)]
            self.waited += time.perf_counter() - started
            last = micro_step + 1 == self.micro_steps
            self._next = (epoch + 1, 0) if last else (epoch, micro_step + 1)
            if last and not self._config.persistent_workers:
                self.close()
            yield chunks

    def _open(self) -> Iterator[ViewChunk]:
        config, epoch = self._config, self._next
        workers = config.num_workers
        loader: DataLoader[Any] = DataLoader(
            _as_dataset(self._dataset),
            batch_sampler=_Endless(self, *epoch),
            collate_fn=self._collate,
            num_workers=workers,
            prefetch_factor=config.prefetch_factor if workers else None,
            timeout=POLL_S if workers else 0,
            pin_memory=self._pin_memory,
            multiprocessing_context=worker_context() if workers else None,
            worker_init_fn=init_worker if workers else None,
        )
        # Workers ignore SIGTERM, which is how multiprocessing ends what is left at exit: end them before that.
        atexit.register(self.close)
        return iter(loader)

    def _take(self, micro_step: int, chunk: int) -> ViewChunk:
        assert self._stream is not None
        started = time.monotonic()
        while True:
            try:
                return next(self._stream)
            except UserError as error:
                raise UserError(_innermost(error)) from error
            except RuntimeError as error:
                text = str(error)
                if "exited unexpectedly" in text or "killed by signal" in text:
                    raise UserError(
                        f"a loader worker died while reading {self._reading(micro_step, chunk)} "
                        f"({text.splitlines()[0]}); most often memory ran out: lower loader.num_workers, "
                        "loader.prefetch_factor or loader.micro_batch_size"
                    ) from error
                if "timed out after" not in text:
                    raise
                # Nobody delivered for POLL_S and all workers live: waiting goes on until loader.timeout.
                limit = self._config.timeout
                if limit and time.monotonic() - started >= limit:
                    self._stuck = True
                    raise UserError(
                        f"no clips came for loader.timeout={limit} seconds while reading "
                        f"{self._reading(micro_step, chunk)}; look at these files and their disk, or raise "
                        "loader.timeout"
                    ) from error

    def _reading(self, micro_step: int, chunk: int) -> str:
        epoch = 0 if self._fixed_epoch else self._next[0]
        first = rank_positions(micro_step, batch=self.batch, world=self.world, rank=self.rank).start
        start = first + chunk * self.micro_batch
        draws = self.plan.draws(epoch, start, start + self.micro_batch)
        files = list(dict.fromkeys(self._describe(draw) for draw in draws))
        more = f" and {len(files) - NAMED_FILES} more" if len(files) > NAMED_FILES else ""
        return ", ".join(files[:NAMED_FILES]) + more

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        atexit.unregister(self.close)
        workers = list(getattr(stream, "_workers", []))
        if self._stuck:  # asking it to end would wait for it in vain
            self._stuck = False
            for worker in workers:
                worker.kill()
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        for worker in workers:
            if worker.is_alive():
                worker.kill()


def ignored_settings(config: LoaderConfig) -> list[str]:
    """Loader settings that have no meaning without workers, by key; empty when there are workers."""
    if config.num_workers:
        return []
    return [
        f"loader.{key}"
        for key, given in (
            ("persistent_workers", config.persistent_workers),
            ("prefetch_factor", config.prefetch_factor is not None),
            ("timeout", config.timeout > 0),
        )
        if given
    ]


def _as_dataset(maker: ClipMaker) -> Dataset[Any]:
    return maker  # type: ignore[return-value]  # torch only calls __getitems__


def _innermost(error: UserError) -> str:
    """The sentence of a refusal, without the traceback that crossing a process boundary wraps around it."""
    marker = f"{UserError.__module__}.{UserError.__qualname__}: "
    return str(error).rpartition(marker)[2].strip()
