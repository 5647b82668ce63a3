"""Jobs of a decoding process that write down every file opened, searched and decoded, and every picture encoded.

The place to write to is in the environment, since a process cannot be told otherwise before its first task.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import simplejpeg

LOG = "WATCHED_AV_LOG"
_open, _encode = av.open, simplejpeg.encode_jpeg_yuv_planes


class Seen(NamedTuple):
    """What was written down."""

    opened: list[str]
    sought: list[int]
    """time stamps"""
    decoded: list[int]
    """decoding time stamps of the packets that were given to the decoder"""
    encoded: int


def read_log(path: Path) -> Seen:
    """All that was written down since the log was last removed."""
    events = [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
    return Seen(
        opened=[value for kind, value in events if kind == "open"],
        sought=[int(value) for kind, value in events if kind == "seek"],
        decoded=[int(value) for kind, value in events if kind == "packet"],
        encoded=sum(kind == "encode" for kind, _ in events),
    )


def _write(kind: str, value: Any) -> None:
    with Path(os.environ[LOG]).open("a") as file:
        file.write(f"{kind} {value}\n")


class _Packet:
    def __init__(self, packet: Any) -> None:
        self._packet = packet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)

    def decode(self) -> Any:
        if self._packet.size:
            _write("packet", self._packet.dts)
        return self._packet.decode()


class _Container:
    def __init__(self, container: Any) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)

    def __enter__(self) -> _Container:
        return self

    def __exit__(self, *error: object) -> None:
        self._container.close()

    def demux(self, *streams: Any) -> Iterator[_Packet]:
        return map(_Packet, self._container.demux(*streams))

    def seek(self, offset: int, **how: Any) -> None:
        _write("seek", offset)
        self._container.seek(offset, **how)


def opened(file: Any, *args: Any, **options: Any) -> _Container:
    """In place of ``av.open``."""
    _write("open", file)
    return _Container(_open(file, *args, **options))


def encoded(*planes: Any, **options: Any) -> Any:
    """In place of ``simplejpeg.encode_jpeg_yuv_planes``."""
    _write("encode", "")
    return _encode(*planes, **options)


def _watch() -> None:
    av.open, simplejpeg.encode_jpeg_yuv_planes = opened, encoded


def ingest_file(payload: Any, tick: Any) -> Any:
    """The job of ``marey ingest``."""
    from marey.pixels.ingest_worker import ingest_file as whole

    _watch()
    return whole(payload, tick)


def read_frames(payload: Any, tick: Any) -> Any:
    """The job that serves clips straight from video."""
    from marey.pixels.framejob import read_frames as whole

    _watch()
    return whole(payload, tick)
