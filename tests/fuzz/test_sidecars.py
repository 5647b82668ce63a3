"""Sidecars of latents and text indexes, damaged: refused in words, or exactly what was asked for."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from marey.latents.sidecar import Expected, read_frames, read_shape, sidecar_metadata, write_sidecar
from marey.latents.text import PrecomputedText, write_text_index
from tests.fuzz.mutations import FAST, VALUES, damaged, said

LATENTS = torch.arange(2 * 5 * 3 * 4, dtype=torch.float32).reshape(2, 5, 3, 4)
EXPECTED = Expected(5, 3, 4)


def stored(suffix: str, latents: Any = LATENTS) -> bytes:
    buffer = io.BytesIO()
    if suffix == ".npy":
        np.save(buffer, latents.numpy())
    elif suffix == ".pt":
        torch.save(latents, buffer)
    elif suffix == ".old.pt":
        torch.save(latents, buffer, _use_new_zipfile_serialization=False)
    else:
        return save({"video_latents": latents})
    return buffer.getvalue()


def huge_npy() -> bytes:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 5, 3000, 4000), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


def huge_safetensors() -> bytes:
    shape = [1_000_000, 5, 3_000, 4_000]
    header = json.dumps({"video_latents": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * 6 * 10**13]}})
    return struct.pack("<Q", len(header)) + header.encode()


def read(path: Path) -> None:
    frames = read_frames(path, clip="c", expected=EXPECTED, start=1, frames=3)
    assert frames.shape[1:] == (3, 3, 4)
    assert frames.is_floating_point()
    assert torch.isfinite(frames).all()
    # Bytes nobody asked for may be anything; the file can hold no more than itself.
    assert frames.numel() * frames.element_size() <= path.stat().st_size


@FAST
@given(data=st.data(), suffix=st.sampled_from([".safetensors", ".npy", ".pt", ".old.pt"]))
def test_a_damaged_sidecar_is_refused_or_has_the_shape_asked_for(
    tmp_path: Path, data: st.DataObject, suffix: str
) -> None:
    path = tmp_path / f"a{Path(suffix).suffix}"
    path.write_bytes(data.draw(damaged(stored(suffix))))
    said(lambda: read(path))
    said(lambda: read_shape(path, clip="c"))
    sidecar_metadata(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.npy", huge_npy()),
        ("a.safetensors", huge_safetensors()),
        ("a.safetensors", struct.pack("<Q", 2**63) + b"{}"),
        ("a.pt", stored(".pt", LATENTS[:1, :, :1, :1].expand(10**6, 5, 3, 4))),
        ("a.pt", stored(".pt", torch.zeros(2, 5, 3, 4).to_sparse())),
        ("a.npy", stored(".npy")[:60]),
    ],
)
def test_what_a_header_claims_beyond_the_file_is_refused_before_memory_is_taken(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert said(lambda: read(path)) is not None


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """Torch stores its archives as they are; one that unpacks to a thousand times its size is no sidecar."""
    plain, packed = io.BytesIO(stored(".pt")), tmp_path / "a.pt"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    text = said(lambda: read(packed))
    assert text is not None
    assert "compressed" in text


@FAST
@given(entry=VALUES, name=st.sampled_from(["layout", "marey", "format"]))
@example(entry={"layout": ["CTHW"]}, name="marey")
@example(entry={"layout": None}, name="marey")
def test_any_metadata_of_a_sidecar_is_refused_or_read(tmp_path: Path, entry: Any, name: str) -> None:
    text = entry if isinstance(entry, str) else json.dumps(entry)
    (tmp_path / "a.safetensors").write_bytes(save({"x": LATENTS}, metadata={name: text}))
    said(lambda: read(tmp_path / "a.safetensors"))
    said(lambda: read_shape(tmp_path / "a.safetensors", clip="c"))


def test_what_is_written_is_read_back_whole(tmp_path: Path) -> None:
    write_sidecar(tmp_path / "a.safetensors", LATENTS, metadata={})
    assert said(lambda: read(tmp_path / "a.safetensors")) is None


@pytest.fixture(scope="module")
def text_index(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("text") / "index.safetensors"
    texts = [("", torch.ones(1, 3)), ("pick up", torch.full((2, 3), 2.0)), ("put down", torch.full((2, 3), 3.0))]
    write_text_index(path, texts, encoder="e", token_limit=4)
    return path.read_bytes()


@FAST
@given(data=st.data())
def test_a_damaged_text_index_is_refused_or_gives_embeddings(
    tmp_path: Path, text_index: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "index.safetensors"
    path.write_bytes(data.draw(damaged(text_index)))

    def use() -> None:
        index = PrecomputedText(path, encoder="e", token_limit=4)
        for text in ("", "pick up", "put down", "other"):
            found: list[torch.Tensor] = []
            said(lambda text=text, found=found: found.append(index.encode(text, clip="c")))  # type: ignore[misc]
            for embedding in found:
                assert embedding.dtype == torch.float32
                assert 1 <= embedding.shape[0] <= 4
                assert embedding.shape[1] == index.width
                assert torch.isfinite(embedding).all()

    said(use)
