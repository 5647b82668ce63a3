"""An ingest's unfinished work on disk: who holds it, what was asked, which files are done.

``OUT.lance.partial/`` holds ``lock`` (flock), ``plan.json`` (settings and a fingerprint of the files),
``journal.jsonl`` (one line per file whose outcome is known, written by the main process alone), ``chunks/`` (frames
waiting to be committed) and ``store.lance`` (the table so far), which is renamed to ``OUT.lance`` once it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marey.core.errors import UserError
from marey.core.files import write_json
from marey.pixels.ingest_worker import chunk_path
from marey.pixels.storeformat import partial_path


class Unfinished:
    """The folder of one ingest. Use ``with Unfinished.hold(out) as work``."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = out, folder
        self.chunks = folder / "chunks"
        self.store = folder / "store.lance"
        self._plan = folder / "plan.json"
        self._journal = folder / "journal.jsonl"

    @classmethod
    @contextlib.contextmanager
    def hold(cls, out: Path) -> Iterator[Unfinished]:
        """Make the folder if need be and lock it; ``UserError`` if another process holds it."""
        folder = partial_path(out)
        try:
            lock = _lock(folder)
        except OSError as error:
            raise UserError(
                f"cannot write to {folder.parent}: {error.strerror}; choose another place for the output"
            ) from None
        if lock is None:
            raise UserError(f"another `marey ingest` is writing {out} right now; wait for it, or choose another output")
        try:
            yield cls(out, folder)
        except OSError as error:  # sources are read by other processes: this one only writes
            raise UserError(
                f"cannot write to {folder.parent}: {error.strerror or error}; make room, and run the same command "
                "again to go on from here"
            ) from error
        finally:
            os.close(lock)

    def begin(self, plan: dict[str, Any]) -> bool:
        """Start, or go on where the same plan was stopped (True); another plan is a ``UserError``."""
        resumed = self._plan.exists()
        if resumed:
            compare_plans(self._read(self._plan.read_bytes(), self._plan), plan, where=str(self.folder))
        elif any(item.name != "lock" and not item.name.startswith(".") for item in self.folder.iterdir()):
            raise UserError(f"{self.folder} exists and is no unfinished ingest; move it away")
        else:
            write_json(self._plan, plan)
        self.chunks.mkdir(exist_ok=True)
        for leftover in self.chunks.glob(".*.tmp"):
            leftover.unlink()
        return resumed

    def outcomes(self) -> dict[int, dict[str, Any]]:
        """Outcome of each finished file, by its position in the plan. A line cut short by a kill is dropped."""
        found: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            data = self._journal.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self._journal, len(whole))
            for line in whole.splitlines():
                entry = self._read(line, self._journal)
                if not isinstance(entry.get("source"), int) or not isinstance(entry.get("outcome"), dict):
                    raise self._damaged(self._journal)
                found[entry["source"]] = entry["outcome"]
        return found

    def _read(self, text: bytes, where: Path) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._damaged(where)
        return found

    def _damaged(self, where: Path) -> UserError:
        return UserError(f"{where} is damaged; delete {self.folder} and run the command again")

    def record(self, source: int, outcome: dict[str, Any]) -> None:
        """Add a file's outcome to the journal."""
        line = json.dumps({"source": source, "outcome": outcome}, ensure_ascii=True) + "\n"
        with self._journal.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def chunk(self, source: int, number: int) -> Path:
        """A chunk file's path."""
        return chunk_path(self.chunks, source, number)

    def chunks_of(self) -> dict[int, int]:
        """For each source with chunk files: how many there are, from number 0 on without a gap."""
        numbers: dict[int, list[int]] = {}
        for path in self.chunks.glob("*.arrow"):
            source, _, number = path.stem.partition("-")
            numbers.setdefault(int(source), []).append(int(number))
        return {source: _prefix(sorted(found)) for source, found in numbers.items()}

    def drop_chunks(self, source: int) -> None:
        """Delete a source's chunk files."""
        number = 0
        while (path := self.chunk(source, number)).exists():
            path.unlink()
            number += 1

    def publish(self) -> None:
        """Rename the finished table to its place, and delete what is left."""
        self.store.rename(self.out)
        self.discard()

    def discard(self) -> None:
        """Delete the folder. The lock's file goes last, so that no second ingest slips in before."""
        for folder in (self.chunks, self.store):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self._journal, self._plan, self.folder / "lock"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies in it, which is not ours to delete
            self.folder.rmdir()


def compare_plans(old: dict[str, Any], new: dict[str, Any], *, where: str) -> None:
    """``UserError`` naming the first setting in which two plans differ."""
    advice = "give the same command to go on, choose another output, or delete it to start afresh"
    for key, value in new["settings"].items():
        was = old.get("settings", {}).get(key)
        if was != value:
            raise UserError(f"{where} was begun with {key}={was}, and this command says {key}={value}; {advice}")
    if old.get("fingerprint") != new["fingerprint"]:
        raise UserError(
            f"{where} was begun with other files ({old.get('sources')} then, {new['sources']} now, "
            f"or some have changed since); {advice}"
        )


def _prefix(numbers: list[int]) -> int:
    end = 0
    while end < len(numbers) and numbers[end] == end:
        end += 1
    return end


def _lock(folder: Path) -> int | None:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its holder has just deleted the folder
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        try:
            if os.stat(folder / "lock").st_ino == os.fstat(handle).st_ino:  # noqa: PTH116
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # deleted between opening and locking: try with the new one
