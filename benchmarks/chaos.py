"""Kill a training run again and again, resume it each time, and hold its end against a run that nobody touched.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/chaos.py --kills 50 --seed 0
    python benchmarks/chaos.py --kills 20 --objective causal --out chaos-causal
    python benchmarks/chaos.py --kills 20 loader.num_workers=2

A small run (`marey train`: averaged weights, accumulation, validation after every epoch, a checkpoint every other
step) on 24 clips of handwritten digits is killed with SIGKILL, its whole process group, at moments drawn from the
seed: so many seconds after the start, during the n-th checkpoint write, right after one, in the n-th step, in a
validation. It goes on as a person would let it go on: with the command that its receipt records, or by giving the
first command again and following what the refusal says resumes the run. After the last kill it is left to end.

Then everything is compared with the untouched run: all tensors and counts of the checkpoints, bit by bit; rows of
metrics and validation (time columns excepted); exposure; what the receipt says was consumed; the names of all files.
And after every kill: no complete checkpoint has gone (those that `checkpoint.save_top_k` retires excepted), each is
the untouched run's of its step, and the resume repeats nothing that was done before the last one was written.

Each attempt is a process of its own, forked from one that has imported Lightning and started no thread;
``--fresh-process`` starts an interpreter each time instead. Words like those of `marey train` change the settings of
both runs: with ``loader.num_workers=2`` each kill takes the loader's processes along. The last word is ``identical``;
the exit status is 1 when anything differs, was lost or was left over. OUT/chaos.json has the numbers and the machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from marey.core.files import write_json
from marey.core.keys import permutation, rng

EVERY = 2  # optimizer steps from checkpoint to checkpoint
KEEP = 5  # checkpoints of the run that is killed; the untouched one keeps all, to compare with
PER_EPOCH = 6  # optimizer steps of an epoch, as the settings below and 24 clips of data make it
SPARE = 6  # steps before the end that no attempt may reach while kills are to come
PATIENCE = 900.0  # seconds that an attempt may take
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
BOTH = (
    *("loader.num_workers=0", "accumulate_grad_batches=2", "ema.decay=0.9", "ema.update_every=3"),
    *("trainer.accelerator=cpu", "trainer.max_epochs=-1", "trainer.limit_val_batches=2", "trainer.logger=false"),
    *("trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false", f"checkpoint.every_n_train_steps={EVERY}"),
)
SETTINGS = {
    "encoder": (
        *("recipe=smoke", "data=custom", "loader.batch_size=4", "loader.clips_per_video=2", "model.img_size=32"),
        *("model.num_frames=4", "augmentation.local_size=16", "augmentation.local_crops_number=1"),
        *("projector.hidden_dim=16", "projector.output_dim=8", "loss.sigreg.kwargs.num_proj=16", *BOTH),
    ),
    "causal": (
        *("--config-name", "causal_video", "model.hidden=32", "model.layers=2", "model.heads=2", "ema.enabled=true"),
        *("data.train_batch_size=2", "data.buckets=[[1,2],[2,4]]", "data.val_fraction=0.1", "data.epoch_draws=26"),
        *("data.batching.bucket_pool_size=8", *BOTH),
    ),
}
LANDINGS = {
    "start-up": "before the attempt's first step was complete",
    "step": "in a training step",
    "checkpoint write": "its temporary file was left behind",
    "after a checkpoint": "renamed; pointer, retention or records were still to come",
    "validation": "between an epoch's last step and its validation row",
    "records": "a temporary file was left behind in the run folder",
}
# What kills aim at, and how often of twenty; they may land elsewhere.
AIMS = {"start": 4, "step": 3, "write": 7, "saved": 3, "validation": 3}
DECK = [aim for aim, times in AIMS.items() for _ in range(times)]


# -- processes


class Attempt:
    """One process that can be killed; ``code`` is its exit status once it has ended."""

    def __init__(self, pid: int, ended: Callable[[], int | None], log: Path) -> None:
        self.pid, self.log, self._ended = pid, log, ended
        self.code: int | None = None

    def running(self) -> bool:
        if self.code is None:
            self.code = self._ended()
        return self.code is None

    def wait(self) -> int:
        end = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > end:
                self.kill()
                raise SystemExit(f"an attempt had not ended after {PATIENCE:.0f} seconds; see {self.log}")
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """SIGKILL to its process group, workers included."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.running():
            time.sleep(0.001)


Launch = Callable[[Sequence[str], Path], Attempt]
"""Start ``marey WORDS`` with its output in a file."""


@contextmanager
def warm_processes() -> Iterator[Launch]:
    """Attempts forked from a process that has done the imports, so that one starts in a second."""
    context = multiprocessing.get_context("spawn")  # this process may have threads, which a fork would not survive
    orders, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,))
    # Before it imports anything: NumPy's OpenBLAS starts its threads on import.
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        server.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()

    def launch(words: Sequence[str], log: Path) -> Attempt:
        orders.send((list(words), str(log)))
        return Attempt(orders.recv(), lambda: int(orders.recv()) if orders.poll() else None, log)

    try:
        orders.recv()
        yield launch
    finally:
        orders.close()
        server.join()


@contextmanager
def fresh_processes() -> Iterator[Launch]:
    """Attempts as interpreters of their own."""

    def launch(words: Sequence[str], log: Path) -> Attempt:
        command = [sys.executable, "-m", "marey", *words]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | ENVIRONMENT,
            )
        return Attempt(process.pid, process.poll, log)

    yield launch


def _serve(orders: Connection) -> None:
    """Fork a child for each order: (words after ``marey``, log file). Answers its pid, then its exit status."""
    import marey.training.application
    import marey.training.fit  # noqa: F401  # with Lightning

    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "a thread would not survive the fork"
    orders.send(None)
    while True:
        try:
            words, log = orders.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            _run(words, log, orders)
        with suppress(PermissionError, ProcessLookupError):  # the child was faster, or is already gone
            os.setpgid(pid, pid)
        orders.send(pid)
        orders.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(words: list[str], log: str, orders: Connection) -> NoReturn:
    """The life of a forked child: ``marey WORDS``, and its exit status as the interpreter would give it."""
    os.setpgid(0, 0)
    orders.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
    os.dup2(1, 2)
    sys.argv = ["marey", *words]
    code: Any = 0
    try:
        from marey.cli import main

        main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


# -- a run, seen from outside


class Run:
    """One run's folders, as whoever started it sees them."""

    def __init__(self, folder: Path, words: Sequence[str], *, keep: int) -> None:
        self.folder, self.checkpoints = folder / "run", folder / "checkpoints"
        places = (f"checkpoint.dirpath={self.checkpoints}", f"hydra.run.dir={self.folder}")
        self.command = ["train", *words, f"checkpoint.save_top_k={keep}", *places]

    def rows(self, name: str = "metrics.csv") -> list[dict[str, str]]:
        """Whole rows: one that is being written does not count."""
        path = self.folder / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))

    def last_step(self, name: str = "metrics.csv") -> int:
        return max((int(row["step"]) for row in self.rows(name)), default=0)

    def receipt(self) -> dict[str, Any]:
        path = self.folder / "receipt.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def complete(self) -> dict[int, Path]:
        """By step: the checkpoints that the program itself takes for complete."""
        from marey.training.folders import LAST, checkpoints_in

        return {step_of(path.name): path for path in checkpoints_in(self.checkpoints) if path.name != LAST}

    def temporary(self) -> set[Path]:
        """Half-written files."""
        return {path for folder in (self.checkpoints, self.folder) for path in folder.rglob(".*.tmp")}

    def files(self) -> dict[str, Path]:
        """All files by name; step checkpoints are not among them."""
        found = [path for folder in (self.checkpoints, self.folder) for path in folder.rglob("*") if path.is_file()]
        complete = set(self.complete().values())
        return {str(path.relative_to(self.folder.parent)): path for path in found if path not in complete}


def step_of(name: str) -> int:
    """The optimizer step in a checkpoint's name."""
    match = re.search(r"step-(\d+)", name)
    assert match is not None, name
    return int(match[1])


class Watcher:
    """Notes what an attempt does, by looking at its folders again and again."""

    def __init__(self, run: Run, *, resumed: int) -> None:
        self.run, self.resumed = run, resumed
        self.step = resumed  # the last that is complete
        self.began = False  # training has started, with a metrics file of its own
        self.fewest = sys.maxsize  # checkpoints at any look
        self.at: dict[str, list[float]] = {"start": [0.0], **{aim: [] for aim in AIMS if aim != "start"}}
        self.took: dict[str, list[float]] = {"write": [], "validation": []}
        self._start = time.perf_counter()
        self._old = self._seen = self._metrics()
        self._names = self._left = self._checkpoint_names()
        self._validated = run.last_step("validation.csv")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def writing(self) -> bool:
        """A half-written checkpoint was there at the last look."""
        return any(name.endswith(".tmp") for name in self._names - self._left)

    def _checkpoint_names(self) -> set[str]:
        with suppress(FileNotFoundError):
            return {path.name for path in self.run.checkpoints.iterdir() if "step-" in path.name}
        return set()

    def _metrics(self) -> tuple[int, int]:
        with suppress(FileNotFoundError):
            status = (self.run.folder / "metrics.csv").stat()
            return status.st_ino, status.st_size
        return (0, 0)

    def look(self) -> None:
        """Note what is new since the last look."""
        now, names = self.seconds, self._checkpoint_names()
        new = names - self._names
        self.at["write"] += [now for name in new if name.endswith(".tmp")]
        self.at["saved"] += [now for name in new if name.endswith(".ckpt")]
        if self.at["write"]:
            self.took["write"] += [now - self.at["write"][-1] for name in self._names - names if name.endswith(".tmp")]
        self._names = names
        self.fewest = min(self.fewest, sum(name.endswith(".ckpt") for name in names))
        if len(self.took["validation"]) < len(self.at["validation"]):
            validated = self.run.last_step("validation.csv")
            if validated != self._validated:
                self._validated = validated
                self.took["validation"].append(now - self.at["validation"][-1])
        metrics = self._metrics()
        if metrics == self._seen:
            return
        self._seen = metrics
        self.began = self.began or metrics[0] != self._old[0]
        if self.began:
            made = range(self.step + 1, self.run.last_step() + 1)
            self.at["step"] += [now for _ in made]
            self.at["validation"] += [now for step in made if step % PER_EPOCH == 0]
            self.step += len(made)

    def follow(self, attempt: Attempt, until: Callable[[], bool]) -> bool:
        """Look until the attempt ends by itself (False) or ``until`` says so (True)."""
        while attempt.running():
            self.look()
            if until():
                return True
            if self.seconds > PATIENCE:
                attempt.kill()
                raise SystemExit(f"an attempt had not ended after {PATIENCE:.0f} seconds; see {attempt.log}")
            time.sleep(0.0003)
        self.look()
        return False


def landing(watcher: Watcher, before: set[Path]) -> str:
    """Where a kill has landed, from what it left; ``before``: temporary files older than the attempt."""
    run, step = watcher.run, watcher.step
    new = run.temporary() - before
    if any(path.parent == run.checkpoints for path in new):
        return "checkpoint write"
    if new:
        return "records"
    if not watcher.began or step == watcher.resumed:
        return "start-up"
    if step in run.complete():
        entries = run.receipt()["checkpoints"]
        if not entries or entries[-1]["step"] != step:
            return "after a checkpoint"
        if step % PER_EPOCH == 0 and run.last_step("validation.csv") != step:
            return "validation"
    return "step"


# -- kills


class Moment(NamedTuple):
    """``delay`` seconds after the ``nth``-th event of its kind in an attempt."""

    event: str
    nth: int
    delay: float

    def has_come(self, watcher: Watcher) -> bool:
        events = watcher.at[self.event]
        if len(events) < self.nth:
            return False
        if self.event == "write" and len(events) < self.nth + 3:
            # A write is over in milliseconds: one that was missed is no reason to give up at once.
            return watcher.writing and watcher.seconds >= events[-1] + self.delay
        return watcher.seconds >= events[self.nth - 1] + self.delay


@dataclass
class Kill:
    """One of them: what it aimed at and hit, the steps its attempt went on from and came to, and what it cost."""

    aimed: str
    landed: str
    resumed: int
    step: int
    seconds: float
    lost: int = 0  # steps that the next attempt makes again


@dataclass
class Campaign:
    """What became of a run that was killed."""

    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resumes: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("from the start", "by the receipt", "by the refusal"), 0)
    )
    resumed: int = 0  # the step that the last attempt went on from
    seconds: float = 0.0
    untouched_seconds: float = 0.0


def draw(seed: int, number: int, pace: dict[str, float]) -> Moment:
    """Where to aim kill ``number``: the deck is dealt in an order of the seed, and then in another one."""
    deal, place = divmod(number, len(DECK))
    event = DECK[permutation(len(DECK), seed, "chaos-deck", deal)[place]]
    draws = rng(seed, "chaos-kill", number)
    nth = int(draws.integers(1, {"step": 4, "write": 3}.get(event, 2)))
    return Moment(event, nth, float(draws.uniform(0.0, pace[event])))


def measure_pace(watcher: Watcher) -> dict[str, float]:
    """Seconds over which the kills of each aim are spread: how long the thing takes when nobody disturbs it."""
    steps = watcher.at["step"]
    step = statistics.median(b - a for a, b in pairwise(steps))
    write = statistics.median(watcher.took["write"] or [step])
    validation = statistics.median(watcher.took["validation"] or [step])
    return {"start": 1.1 * steps[0], "step": step, "write": write, "saved": write / 2, "validation": validation}


def how_to_resume(launch: Launch, run: Run, log: Path, *, by_receipt: bool) -> tuple[str, list[str]]:
    """The words a person would give now, and who told them: receipt, refusal, or the first command alone."""
    words = run.command
    recorded = run.receipt().get("resume_command")
    if by_receipt and recorded is not None:
        words = shlex.split(recorded)
        words = words[words.index("train") :]
    if any(word.startswith("resume.ckpt_path=") for word in words):
        return "by the receipt", words
    if not run.complete():
        return "from the start", words
    attempt = launch(words, log)
    try:
        code = attempt.wait()
    finally:
        attempt.kill()
    said = re.findall(r"\bresume\.\w+=\S+", log.read_text(encoding="utf-8", errors="replace"))
    told = dict(word.rstrip(".,;'\"`").split("=", 1) for word in said)
    if code != 2 or "resume.ckpt_path" not in told:
        raise SystemExit(f"given again over complete checkpoints, the command should say how to resume; see {log}")
    return "by the refusal", [*words, *(f"{key}={value}" for key, value in told.items())]


class Guard:
    """Holds a run against its promises after every kill."""

    def __init__(self, run: Run, whole: Run) -> None:
        self.run, self.problems = run, list[str]()
        self._whole = whole.complete()
        self._checked: set[tuple[int, int]] = set()
        self._newest = self._fewest = self._owed = 0

    def check(self, watcher: Watcher, when: str) -> None:
        """Nothing complete may have gone, and everything complete is the untouched run's."""
        complete = self.run.complete()
        newest, fewest = max(complete, default=0), min(len(complete), watcher.fewest)
        if newest < self._newest:
            self.problems.append(f"{when}: the newest checkpoint was of step {self._newest} and is of step {newest}")
        if fewest < self._fewest:
            self.problems.append(f"{when}: {fewest} checkpoints, after there had been {self._fewest}")
        self._newest, self._fewest = newest, min(len(complete), KEEP)
        # Once a step is complete, so is every checkpoint of the steps before it; its own may be half-way.
        self._owed = max(watcher.resumed, (watcher.step - 1) // EVERY * EVERY)
        for step, path in complete.items():
            status = path.stat()
            if (status.st_ino, status.st_mtime_ns) not in self._checked:
                self._checked.add((status.st_ino, status.st_mtime_ns))
                found = compare_checkpoints(self._whole[step], path)
                self.problems.extend(f"{when}: {path.name}: {line}" for line in found)

    def check_resume(self, step: int, when: str) -> None:
        """What a resume repeats was done after the last checkpoint that had been written."""
        if step < self._owed:
            self.problems.append(f"{when}: it resumes from step {step}; step {self._owed} had been saved")


def torment(
    launch: Launch, run: Run, whole: Run, *, kills: int, seed: int, last: int, pace: dict[str, float], logs: Path
) -> Campaign:
    """Start ``run``, kill it ``kills`` times, let it end at step ``last``."""
    campaign, guard, start = Campaign(), Guard(run, whole), time.perf_counter()
    for number in range(kills + 1):
        name = f"attempt-{number:03d}"
        teller, words = how_to_resume(launch, run, logs / f"{name}-asked.txt", by_receipt=number % 2 == 1)
        campaign.resumes[teller] += 1
        resumed = 0
        if teller != "from the start":
            path = next(word for word in words if word.startswith("resume.ckpt_path=")).partition("=")[2]
            resumed = int(load(Path(path.strip("'\"")))["marey"]["step"])
        guard.check_resume(resumed, name)
        if campaign.kills:
            campaign.kills[-1].lost = max(0, campaign.kills[-1].step - resumed)
        before = run.temporary()
        moment = draw(seed, number, pace)
        attempt, watcher = launch(words, logs / f"{name}.txt"), Watcher(run, resumed=resumed)

        def due(watcher: Watcher = watcher, moment: Moment = moment, number: int = number) -> bool:
            return number < kills and (moment.has_come(watcher) or watcher.step >= last - SPARE)

        try:
            watcher.follow(attempt, due)
        finally:
            attempt.kill()
        watcher.look()
        if attempt.code != (-signal.SIGKILL if number < kills else 0):
            raise SystemExit(f"{name} of {kills} ended by itself with exit status {attempt.code}; see {attempt.log}")
        if number < kills:
            where = landing(watcher, before)
            campaign.kills.append(Kill(moment.event, where, resumed, watcher.step, round(watcher.seconds, 3)))
        if watcher.at["step"]:  # the first start of all is the slowest
            pace["start"] = min(pace["start"], 1.1 * watcher.at["step"][0])
        campaign.resumed = resumed
        guard.check(watcher, name)
    campaign.seconds = round(time.perf_counter() - start, 1)
    campaign.problems = guard.problems
    return campaign


# -- comparison


def load(path: Path) -> dict[str, Any]:
    """A checkpoint: tensors and plain values."""
    import torch

    return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees of plain values and tensors differ; tensors are compared bit by bit."""
    import torch

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{where}: {a.dtype} {tuple(a.shape)}, and {b.dtype} {tuple(b.shape)}"]
        if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            return []
        apart = (a.double() - b.double()).abs()
        return [f"{where}: {int((apart != 0).sum())} of {a.numel()} numbers differ, by up to {float(apart.max()):.3g}"]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{where}.{key}: in one of them only" for key in sorted(a.keys() ^ b.keys(), key=str)]
        return found + [line for key in a if key in b for line in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for index, (x, y) in pairs for line in differences(x, y, f"{where}[{index}]")]
    return [] if a == b else [f"{where}: {a!r}, and {b!r}"]


def experiment(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without what tells when, where and how fast it was made."""
    about = checkpoint["marey"]
    kept = ("kind", "step", "epoch", "micro_step", "world_size", "effective_batch", "statistic_batch", "ema")
    interval = {key: value for key, value in about["resume"]["interval"].items() if key not in ("seconds", "wait")}
    counts = {"consumed": about["resume"]["consumed"], "said": about["receipt"]["consumed"], "interval": interval}
    # Lightning also counts validation batches, which nothing reads, and a kill in a validation leaves uncounted.
    loops = {key: value for key, value in checkpoint["loops"]["fit_loop"].items() if ".val_loop." not in key}
    content = {key: value for key, value in checkpoint.items() if key not in ("marey", "loops")}
    return {**content, "fit_loop": loops, "marey": {**{key: about[key] for key in kept}, **counts}}


def compare_checkpoints(one: Path, other: Path) -> list[str]:
    """Differences of two checkpoints, as experiments."""
    return differences(experiment(load(one)), experiment(load(other)))


def compare(whole: Run, run: Run, *, resumed: int) -> list[str]:
    """All that a killed run has left, against the untouched run; ``resumed``: the step it last went on from."""
    import pyarrow.parquet as pq

    def timeless(rows: list[dict[str, str]]) -> dict[str, dict[str, str]]:
        return {row["step"]: {key: row[key] for key in row if "second" not in key} for row in rows}

    found = []
    complete, reference = run.complete(), whole.complete()
    wanted = set(sorted(reference)[-KEEP:])
    found += [f"checkpoint of step {step}: missing" for step in sorted(wanted - complete.keys())]
    # What a run was resumed from is never removed by that sitting.
    found += [f"{complete[step].name}: left over" for step in sorted(complete.keys() - wanted - {resumed})]
    for step, path in sorted(complete.items()):
        found += [f"{path.name}: {line}" for line in compare_checkpoints(reference[step], path)]
    found += [
        f"last.ckpt: {line}" for line in compare_checkpoints(*(r.checkpoints / "last.ckpt" for r in (whole, run)))
    ]
    for name in ("metrics.csv", "validation.csv"):
        found += differences(timeless(whole.rows(name)), timeless(run.rows(name)), name)
        if len(run.rows(name)) != len(timeless(run.rows(name))):
            found.append(f"{name}: two rows of one step")
    for key in ("status", "consumed", "ema", "steps", "batch", "parameters"):
        found += differences(whole.receipt()[key], run.receipt()[key], f"receipt.{key}")
    there, here = whole.files(), run.files()
    found += [f"{name}: missing" for name in sorted(there.keys() - here.keys())]
    found += [f"{name}: left over" for name in sorted(here.keys() - there.keys())]
    for name in sorted(there.keys() & here.keys()):
        if name.endswith(".parquet"):
            one, other = (pq.read_table(files[name]).to_pydict() for files in (there, here))
            found += differences(one, other, name)
    return found


# -- the whole of it


def make_data(launch: Launch, folder: Path, *, objective: str, logs: Path) -> Path:
    """24 clips of handwritten digits, ingested; encoded too where latents are learned from."""
    from marey.pixels import digits

    videos, store, latents = folder / "videos", folder / "digits.lance", folder / "latents"
    videos.mkdir(parents=True)
    for clip in digits.plan_clips()["train"][:24]:
        digits.encode(videos / clip.file, digits.render(clip), "mpeg4")
    orders = [["ingest", str(videos), str(store)]]
    if objective == "causal":
        orders.append(["encode", str(store), str(latents), "--codec", "patch", "--option", "patch=8"])
    for words in orders:
        log = logs / f"{words[0]}.txt"
        if launch(words, log).wait() != 0:
            raise SystemExit(f"marey {words[0]} failed; see {log}")
    return latents / "manifest.csv" if objective == "causal" else store


def chaos(
    launch: Launch,
    out: Path,
    *,
    objective: str,
    kills: int,
    seed: int,
    data: Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Campaign, Run, Run]:
    """The untouched run and the killed one. ``problems`` of the campaign say all that is wrong, compared in the end.

    ``data``: a store (or manifest) of 24 clips instead of the digits. ``overrides``: more words for `marey train`.
    """
    logs = out / "logs"
    logs.mkdir(parents=True)
    data = data or make_data(launch, out / "data", objective=objective, logs=logs)
    last = kills * 3 // 2 + 2 * PER_EPOCH
    words = (*SETTINGS[objective], f"data.train={data}", f"trainer.max_steps={last}", *overrides)
    whole, run = Run(out / "untouched", words, keep=-1), Run(out / "killed", words, keep=KEEP)
    attempt, watcher = launch(whole.command, logs / "untouched.txt"), Watcher(whole, resumed=0)
    try:
        watcher.follow(attempt, lambda: False)
    finally:
        attempt.kill()
    if attempt.code != 0:
        raise SystemExit(f"the untouched run ended with exit status {attempt.code}; see {attempt.log}")
    per_epoch = whole.receipt()["steps"]["steps_per_epoch"]
    if per_epoch != PER_EPOCH:
        raise SystemExit(f"the data make {per_epoch} optimizer steps an epoch, and this counts on {PER_EPOCH}")
    pace, seconds = measure_pace(watcher), watcher.seconds
    campaign = torment(launch, run, whole, kills=kills, seed=seed, last=last, pace=pace, logs=logs)
    campaign.untouched_seconds = round(seconds, 1)
    campaign.problems += compare(whole, run, resumed=campaign.resumed)
    return campaign, whole, run


def table(kills: Sequence[Kill]) -> list[str]:
    """Where kills landed and what they cost, in Markdown."""
    lines = ["| where | kills | steps made again | most of one kill |", "| --- | ---: | ---: | ---: |"]
    for where, meaning in [*LANDINGS.items(), ("all", "")]:
        lost = [kill.lost for kill in kills if where in (kill.landed, "all")]
        said = f"{where} ({meaning})" if meaning else where
        lines.append(f"| {said} | {len(lost)} | {sum(lost)} | {max(lost, default=0)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", choices=sorted(SETTINGS), default="encoder")
    parser.add_argument("--out", type=Path, help="new folder for everything (default: a temporary one)")
    parser.add_argument("--fresh-process", action="store_true", help="an interpreter of its own for every attempt")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more words for `marey train`")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="marey-chaos-"))).resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty; name a new folder")

    from machine import describe_machine, remark

    machine = describe_machine()
    processes = fresh_processes if arguments.fresh_process else warm_processes
    with processes() as launch:
        campaign, whole, _ = chaos(
            launch,
            out,
            objective=arguments.objective,
            kills=arguments.kills,
            seed=arguments.seed,
            overrides=arguments.overrides,
        )
    kills, found = campaign.kills, campaign.problems
    numbers = {**vars(campaign), "kills": [vars(kill) for kill in kills], "steps": whole.last_step()}
    write_json(out / "chaos.json", {"machine": machine, "command": sys.argv, **numbers, "identical": not found})
    print("\n".join(table(kills)))
    told = ", ".join(f"{times} {teller}" for teller, times in campaign.resumes.items() if times)
    print(f"{arguments.objective}, {whole.last_step()} optimizer steps: {len(kills)} kills; attempts: {told}")
    print(f"{campaign.seconds} s with kills, {campaign.untouched_seconds} s untouched")
    if remark(machine):
        print(remark(machine))
    print(f"{out if found or arguments.out else out / 'chaos.json'}")
    if found:
        print("\n".join(found))
        sys.exit(1)
    if not arguments.out:
        for folder in (out / "untouched", out / "killed", out / "data"):
            shutil.rmtree(folder)
    print("identical")


if __name__ == "__main__":
    main()
