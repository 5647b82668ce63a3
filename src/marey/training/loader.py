"""Micro-steps in order, from any position: what the training loop iterates over.

A position is (epoch, micro-step within it). Nothing is drawn from a stream of random numbers and no state
lives in a worker, so starting in the middle of an epoch costs no more than starting at its head.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from marey.core import now
from marey.core.errors import UserError
from marey.training.workers import init_worker, worker_context

NAMED_FILES = 3
"""How many files a message about a stalled worker names."""
POLL_S = 2.0
"""Seconds between two looks at whether the workers still live, while none of them delivers."""
MAX_DEATHS = 3
"""How often workers may die over one micro-step before the run gives up: what kills them again and again is not
chance."""
SETTLE_S = 5.0
"""Seconds within which a worker whose connection broke is seen to be dead."""


class _WorkerDiedError(Exception):
    """A loader process is gone."""


class Reader(Protocol):
    """A dataset that turns a list of requests into what ``collate`` makes one chunk of. Runs in the workers."""

    def __getitems__(self, requests: Sequence[Any], /) -> Any:
        """What ``collate`` takes."""
        ...


class Steps(Protocol):
    """What is asked of the reader, micro-step by micro-step: arithmetic alone."""

    chunks: int
    """Lists of requests that make one micro-step of one rank."""
    batch_key: str
    """The configuration's key for how many samples one list holds."""

    def requests(self, epoch: int, micro_step: int, rank: int) -> list[list[Any]]:
        """The ``chunks`` lists of one micro-step."""
        ...

    def files(self, epoch: int, micro_step: int, rank: int, chunk: int) -> list[str]:
        """The files behind one list, for messages."""
        ...

    def assemble(self, chunks: list[Any]) -> Any:
        """What the training loop gets for one micro-step."""
        ...


class LoaderSettings(Protocol):
    """The part of ``loader.*`` that every kind of run has."""

    @property
    def num_workers(self) -> int:
        """Loader processes per rank."""

    @property
    def persistent_workers(self) -> bool:
        """Whether they outlive an epoch."""

    @property
    def prefetch_factor(self) -> int | None:
        """Lists that each prepares ahead."""

    @property
    def timeout(self) -> int:
        """Seconds."""


class _Endless:
    """Lists of requests from one position on, epoch after epoch."""

    def __init__(self, loader: MicroStepLoader, epoch: int, micro_step: int) -> None:
        self._loader, self._epoch, self._first = loader, epoch, micro_step

    def __iter__(self) -> Iterator[list[Any]]:
        loader, first = self._loader, self._first
        for epoch in itertools.count(self._epoch):
            for micro_step in range(first, loader.micro_steps):
                yield from loader.steps.requests(epoch, micro_step, loader.rank)
            first = 0


class MicroStepLoader:
    """Yields micro-steps of one rank: what ``steps.assemble`` makes of its chunks.

    ``iter()`` goes on where the last one stopped, to the end of the epoch. Workers prefetch across epochs
    (with ``persistent_workers``) and are started with the modules ``preload`` imported. ``waited`` counts the
    seconds spent waiting for data.

    A worker that dies (killed for memory, by hand) is no loss: what it would have delivered is arithmetic, so all
    workers are started anew at the micro-step that is due. ``deaths`` counts that and ``say`` hears of it (stderr
    until it is set); over ``MAX_DEATHS`` on one micro-step it is a UserError.

    ``from_the_top`` makes every ``iter()`` start at the first micro-step of epoch 0 (validation: what is measured
    must not depend on how much was looked at before).
    """

    def __init__(
        self,
        dataset: Reader,
        steps: Steps,
        *,
        config: LoaderSettings,
        micro_steps: int,
        collate: Callable[[Any], Any],
        preload: Sequence[str],
        pin_memory: bool,
        from_the_top: bool = False,
    ) -> None:
        self.steps, self.micro_steps, self.rank = steps, micro_steps, 0
        self.waited = 0.0
        self.deaths = 0
        self.say: Callable[[str], None] = _say
        self._dataset, self._config, self._collate, self._preload = dataset, config, collate, tuple(preload)
        self._pin_memory, self._from_the_top = pin_memory, from_the_top
        self._next = (0, 0)
        self._stream: Iterator[Any] | None = None
        self._stuck = False
        self._notes: tempfile.TemporaryDirectory[str] | None = None
        """Where workers tell what they are reading."""

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

    def __iter__(self) -> Iterator[Any]:
        if self._from_the_top and self._next[1] != 0:
            self.start_at(epoch=0, micro_step=0)
        if self._stream is None:
            self._stream = self._open()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        epoch, first = self._next
        for micro_step in range(first, self.micro_steps):
            started = time.perf_counter()
            chunks = self._chunks(micro_step)
            self.waited += time.perf_counter() - started
            last = micro_step + 1 == self.micro_steps
            self._next = (epoch + 1, 0) if last else (epoch, micro_step + 1)
            if last and not self._config.persistent_workers:
                self.close()
            yield self.steps.assemble(chunks)

    def _open(self) -> Iterator[Any]:
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
            multiprocessing_context=worker_context(self._preload) if workers else None,
            worker_init_fn=self._worker_start() if workers else None,
        )
        # Workers ignore SIGTERM, which is how multiprocessing ends what is left at exit: end them before that.
        atexit.register(self.close)
        stream: Any = iter(loader)
        if workers:
            stream._workers_done_event = _Done(stream._workers_done_event)
        opened: Iterator[Any] = stream
        return opened

    def _worker_start(self) -> Callable[[int], None]:
        self._notes = tempfile.TemporaryDirectory(prefix="marey-reading-", ignore_cleanup_errors=True)
        return functools.partial(init_worker, notes=Path(self._notes.name))

    def _chunks(self, micro_step: int) -> list[Any]:
        """All chunks of the micro-step at ``self._next``, whatever happens to the workers meanwhile."""
        for death in itertools.count(1):
            try:
                return [self._take(micro_step, chunk) for chunk in range(self.steps.chunks)]
            except _WorkerDiedError as died:
                self.deaths += 1
                if death > MAX_DEATHS:
                    raise UserError(
                        f"a loader worker {died}, {death} times over the same micro-step; most often memory ran out: "
                        f"lower loader.num_workers, loader.prefetch_factor or {self.steps.batch_key}"
                    ) from died
                self.say(f"a loader worker {died}; the workers are started anew and nothing is lost")
                self.close(by_force=True)
                self._stream = self._open()
        raise AssertionError  # the count has no end

    def _take(self, micro_step: int, chunk: int) -> Any:
        assert self._stream is not None
        started = time.monotonic()
        while True:
            try:
                return next(self._stream)
            except UserError as error:
                raise UserError(_innermost(error)) from error
            except (OSError, EOFError) as error:
                # Tensors are fetched from the process that made them; one that is gone has taken them along.
                if not self._someone_is_dead():
                    raise
                raise self._died(micro_step, chunk, type(error).__name__) from error
            except RuntimeError as error:
                text = str(error)
                if "exited unexpectedly" in text or "killed by signal" in text:
                    raise self._died(micro_step, chunk, text.splitlines()[0]) from error
                if "timed out after" not in text:
                    raise
                # Nobody delivered for POLL_S and all workers live: waiting goes on until loader.timeout.
                limit = self._config.timeout
                if limit and time.monotonic() - started >= limit:
                    self._stuck = True
                    raise UserError(
                        f"no clips came for loader.timeout={limit} seconds while reading "
                        f"{self._reading(micro_step, chunk)}; look there and at the disk, or raise loader.timeout"
                    ) from error

    def _died(self, micro_step: int, chunk: int, how: str) -> _WorkerDiedError:
        return _WorkerDiedError(f"died while reading {self._reading(micro_step, chunk)} ({how})")

    def _someone_is_dead(self) -> bool:
        workers = getattr(self._stream, "_workers", [])
        deadline = time.monotonic() + SETTLE_S
        while workers and time.monotonic() < deadline:
            if not all(worker.is_alive() for worker in workers):
                return True
            time.sleep(0.05)
        return False

    def _reading(self, micro_step: int, chunk: int) -> str:
        """What the worker at fault is reading; where it does not tell, all that it may be."""
        if self._notes is not None:
            folder = Path(self._notes.name)
            told = [name for worker in self._at_fault() if (name := now.told(folder / str(worker))) is not None]
            if told:
                return " and ".join(dict.fromkeys(told))
        files = list(dict.fromkeys(self.steps.files(self._next[0], micro_step, self.rank, chunk)))
        if len(files) > NAMED_FILES:
            files = [*files[:NAMED_FILES], f"one of {len(files) - NAMED_FILES} more"]
        return " or ".join(filter(None, [", ".join(files[:-1]), files[-1]]))

    def _at_fault(self) -> list[int]:
        """Numbers of the workers that have died, else of the one whose list is due."""
        stream: Any = self._stream
        dead = [number for number, worker in enumerate(stream._workers) if not worker.is_alive()]
        return dead or [stream._task_info[stream._rcvd_idx][0]]

    def close(self, *, by_force: bool = False) -> None:
        """End the workers, ``by_force`` without asking them first. Iterating again starts new ones."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        atexit.unregister(self.close)
        workers = list(getattr(stream, "_workers", []))
        if self._stuck or by_force or not all(worker.is_alive() for worker in workers):
            # Asking them to end would wait in vain for one that hangs, or for one that has gone.
            self._stuck = False
            for worker in workers:
                worker.kill()
        shutdown = getattr(stream, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        if self._notes is not None:
            self._notes.cleanup()
            self._notes = None


class _Done:
    """The event that ends workers, as this process needs it: no worker can take it to its grave.

    PyTorch's is shared under a lock, and a worker that is killed while it asks leaves the lock shut for good: the next
    to ask, this process too, would wait for ever. Here nobody but this process sets it, so it knows without asking.
    """

    def __init__(self, shared: Any) -> None:
        self._shared, self._set = shared, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        ours = self._shared._cond.acquire(timeout=1)
        # What the shared event's own ``set`` does, less the lock, which is not recursive; nobody waits for the event.
        self._shared._flag.acquire(False)
        self._shared._flag.release()
        if ours:
            self._shared._cond.release()


def ignored_settings(config: LoaderSettings) -> list[str]:
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


def _say(line: str) -> None:
    print(f"marey: {line}", file=sys.stderr, flush=True)


def _as_dataset(maker: Reader) -> Dataset[Any]:
    return maker  # type: ignore[return-value]  # torch only calls __getitems__


def _innermost(error: UserError) -> str:
    """The sentence of a refusal, without the traceback that crossing a process boundary wraps around it."""
    marker = f"{type(error).__module__}.{type(error).__qualname__}: "
    return str(error).rpartition(marker)[2].strip()
