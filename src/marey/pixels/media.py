"""Opening a video file that nobody vouches for: what it must be, and which of its streams is the video."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import av
import av.container
import av.video.stream

VIDEO_SUFFIXES = (
    ".3gp", ".asf", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4",
    ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
"""What a folder is searched for, in lower case."""

# FFmpeg looks at the content, not the name: without these lists a file called clip.mp4 could be a playlist
# that opens other files or addresses.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,gif,ogg,nut,ivf,dv,mxf,"
    "mxf_opatom,yuv4mpegpipe,h264,hevc,m4v,mjpeg,vob,obu"
)
_OPTIONS = {"protocol_whitelist": "file", "format_whitelist": _FORMATS}
IO_TIMEOUT_S = 60.0


class Unreadable(Exception):  # noqa: N818 (a finding about a file, not a failure of ours)
    """The file gives no frames. Its text says why, without the file's name."""


def expanded(path: Path | str) -> Path:
    """With a leading ``~`` resolved where there is such a user, else as it is written."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def regular_size(path: str) -> int:
    """Bytes of a regular file; anything else (missing, folder, FIFO, device) is ``Unreadable``."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror}") from None
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise Unreadable(f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")
    if status.st_size == 0:
        raise Unreadable("is empty (0 bytes)")
    return status.st_size


def reason_of(error: av.FFmpegError) -> str:
    """FFmpeg's words: the general one, and the particular one where the log has it."""
    general = (error.strerror or type(error).__name__).strip()
    log = getattr(error, "log", None)
    special = str(log[2]).strip() if log else ""
    if "not on whitelist" in special.lower():
        return "is a playlist, or in a container format that is not read"
    return f"{special} ({general})" if special and special not in general else general


@contextmanager
def open_video(source: str | IO[bytes]) -> Iterator[tuple[av.container.InputContainer, av.video.stream.VideoStream]]:
    """Container and video stream of a regular file, by its path or open, set to decode in this thread alone.

    Raises ``Unreadable`` for anything that is no video. The C calls inside cannot be interrupted: who opens
    files from strangers does so in a process that can be killed (``pixels.pool``).
    """
    if isinstance(source, str):
        regular_size(source)
        # The scheme keeps a name such as "concat:x.mp4" from being read as an instruction.
        source = "file:" + str(Path(source).absolute())
    try:
        container = av.open(source, "r", metadata_errors="replace", timeout=IO_TIMEOUT_S, container_options=_OPTIONS)
    except av.FFmpegError as error:
        raise Unreadable(reason_of(error)) from None
    with container:
        yield container, _video_stream(container)


def _video_stream(container: av.container.InputContainer) -> av.video.stream.VideoStream:
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        held = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        raise Unreadable(f"holds no video stream (it holds {held})")
    best = container.streams.best("video")
    stream = best if best in streams else streams[0]
    if stream.codec_context is None:
        raise Unreadable("is in a codec this FFmpeg cannot decode")
    stream.codec_context.thread_count = 1
    return stream


def promised_seconds(container: av.container.InputContainer, stream: av.video.stream.VideoStream) -> float | None:
    """How long the video is by what the header says of it; None where it says nothing.

    Matroska writes each stream's duration as a tag. The file's own duration is that of its longest stream, so it
    speaks of the video only where there is nothing else. Other containers count frames, or have their duration
    guessed from what is there, which is no promise.
    """
    if not any(name in container.format.name for name in ("matroska", "flv")):
        return None
    for name, value in stream.metadata.items():
        tag = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", value.strip())
        if name.upper().startswith("DURATION") and tag is not None:
            return int(tag[1]) * 3600 + int(tag[2]) * 60 + float(tag[3])
    if len(container.streams) == 1 and container.duration is not None and container.duration > 0:
        return container.duration / av.time_base
    return None


def modified_ns(path: str) -> int:
    """Modification time in nanoseconds; with the size, what says that a file is still the same."""
    return os.stat(path).st_mtime_ns  # noqa: PTH116
