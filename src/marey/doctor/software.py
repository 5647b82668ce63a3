"""What is installed, tried out: jobs that run in a process aside (``doctor.aside``) and return plain facts.

Each imports what it tries, so that importing this module costs nothing: loader workers do.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIP_FRAMES = 16
CLIP_SIDE = 64
CLIP_RATE = 15


def torch_facts(_: None) -> dict[str, Any]:
    """Import torch and multiply two matrices."""
    start = time.perf_counter()
    import torch

    seconds = time.perf_counter() - start
    assert float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()) == 512
    return {
        "version": torch.__version__,
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def torchvision_facts(_: None) -> dict[str, Any]:
    """Import torchvision and run one of its compiled operations; a pair that does not fit fails here."""
    import torch
    import torchvision
    from torchvision.transforms.v2 import functional

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
    functional.resize(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), [8, 8])
    return {"version": torchvision.__version__}


def device_facts(_: None) -> dict[str, Any]:
    """Every accelerator that torch finds, with a bfloat16 product computed on each."""
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cuda": [_cuda_device(number) for number in range(count)],
        "mps": bool(torch.backends.mps.is_available()),
        "built_for": torch.version.cuda or torch.version.hip,
        "complaint": " ".join(str(caught[0].message).split()) if caught else None,
        "cards": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "driver": nvidia_driver(),
    }


def _cuda_device(number: int) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"name": torch.cuda.get_device_name(number), "problem": None}
    try:
        with torch.cuda.device(number):
            free, total = torch.cuda.mem_get_info(number)
            facts |= {"free": free, "total": total}
            facts["bf16"] = bool(torch.cuda.is_bf16_supported(including_emulation=False))
            kind = torch.bfloat16 if facts["bf16"] else torch.float32
            value = torch.ones(128, 128, dtype=kind, device="cuda")
            if float((value @ value).float().mean()) != 128:
                facts["problem"] = "a product of matrices comes out wrong"
    except RuntimeError as error:
        facts["problem"] = " ".join(str(error).split())[:200]
    return facts


def nvidia_driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """``550.54.15``; None where there is none."""
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), None)


def _write_clip(path: Path) -> str:
    """Grey frames, each lighter than the one before; the name of the encoder."""
    import av
    import numpy as np

    from marey.pixels.digits import ENCODERS

    encoder = next((name for name in ENCODERS if name in av.codecs_available), ENCODERS[-1])
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(encoder, rate=CLIP_RATE)
        stream.width = stream.height = CLIP_SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(CLIP_FRAMES):
            picture = np.full((CLIP_SIDE, CLIP_SIDE, 3), _grey(number), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return encoder


def _grey(number: int) -> int:
    return 20 + 12 * number


def decoder_facts(_: None) -> dict[str, Any]:
    """Encode a clip and read it back as training would, frames in a mixed order; the largest error of a grey."""
    import av

    from marey.pixels.decode import index_file
    from marey.pixels.reader import VideoReader

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="marey-doctor-") as folder:
        path = Path(folder) / "clip.mp4"
        encoder = _write_clip(path)
        index = index_file(str(path), rate=CLIP_RATE)
        reader = VideoReader(str(path), index)
        pictures = reader.fetch([CLIP_FRAMES - 1, 0, CLIP_FRAMES // 2])
        reader.close()
    worst = max(abs(float(picture.mean()) - _grey(step)) for step, picture in pictures.items())
    return {
        "version": av.__version__,
        "ffmpeg": getattr(av, "ffmpeg_version_info", None),
        "encoder": encoder,
        "frames": len(index.stamps),
        "worst": worst,
        "seconds": time.perf_counter() - start,
    }


def torchcodec_facts(_: None) -> dict[str, Any] | None:
    """Decode the same clip through TorchCodec; None where it is not installed."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("torchcodec") is None:
        return None
    from torchcodec.decoders import VideoDecoder

    with tempfile.TemporaryDirectory(prefix="marey-doctor-") as folder:
        path = Path(folder) / "clip.mp4"
        _write_clip(path)
        shape = tuple(VideoDecoder(str(path))[0].shape)
    return {"version": importlib.metadata.version("torchcodec"), "shape": shape}


def jpeg_facts(_: None) -> dict[str, Any]:
    """Encode and decode a JPEG; the largest error of a pixel of a smooth picture."""
    import importlib.metadata

    import numpy as np
    import simplejpeg

    from marey.pixels.jpegs import decode_frame

    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    picture = np.ascontiguousarray(np.broadcast_to(ramp[None, :, None], (64, 64, 3)))
    back = np.empty_like(picture)
    fault = decode_frame(simplejpeg.encode_jpeg(picture, quality=90, colorspace="RGB"), back)
    worst = int(np.abs(back.astype(int) - picture.astype(int)).max())
    return {"version": importlib.metadata.version("simplejpeg"), "fault": fault, "worst": worst}


def lance_facts(_: None) -> dict[str, Any]:
    """Write a small table, and take some of its rows."""
    start = time.perf_counter()
    import lance
    import pyarrow as pa

    with tempfile.TemporaryDirectory(prefix="marey-doctor-") as folder:
        path = str(Path(folder) / "table.lance")
        lance.write_dataset(pa.table({"number": list(range(100)), "frame": [bytes([i]) for i in range(100)]}), path)
        taken = lance.dataset(path).take([99, 3, 50], columns=["frame"]).column("frame").to_pylist()
    return {
        "version": lance.__version__,
        "right": taken == [b"\x63", b"\x03", b"\x32"],
        "seconds": time.perf_counter() - start,
    }


class _Probe:
    """A data set whose only item is made by a loader worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: int) -> Any:
        import torch

        return torch.full((1 << 18,), 7, dtype=torch.uint8), own_bytes(), os.getpid()


def own_bytes(path: Path = Path("/proc/self/smaps_rollup")) -> int:
    """Bytes that this process shares with no other, where the system says; else all that it ever held."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        private = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
        if private:
            return 1024 * sum(private)
    except (OSError, ValueError, IndexError):
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def worker_facts(limit_s: float) -> dict[str, Any]:
    """Start a loader worker as training does and take a batch from it through shared memory."""
    from torch.utils.data import DataLoader

    from marey.training.workers import CLIP_MODULES, init_worker, worker_context

    start = time.perf_counter()
    context = worker_context(CLIP_MODULES)
    probe: Any = _Probe()
    loader: Any = DataLoader(
        probe,
        batch_size=None,
        num_workers=1,
        timeout=limit_s,
        multiprocessing_context=context,
        worker_init_fn=init_worker,
    )
    ((values, held, pid),) = list(loader)
    return {
        "method": context.get_start_method(),
        "right": bool((values == 7).all()) and pid != os.getpid(),
        "bytes": held,
        "seconds": time.perf_counter() - start,
    }


def training_facts(_: None) -> dict[str, Any]:
    """Import all that ``marey train`` imports, Lightning above all."""
    import importlib
    import importlib.metadata

    start = time.perf_counter()
    importlib.import_module("marey.training.fit")
    return {"version": importlib.metadata.version("lightning"), "seconds": time.perf_counter() - start}
