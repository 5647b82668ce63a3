from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from marey.core.errors import UserError
from marey.core.files import sha256
from marey.latents.sidecar import Expected, read_frames, read_shape, sidecar_metadata, write_sidecar

EXPECTED = Expected(6, 4, 5)


@pytest.fixture
def latents() -> torch.Tensor:
    return torch.randn(3, 6, 4, 5, generator=torch.Generator().manual_seed(0))


def read(path: Path, **options: object) -> torch.Tensor:
    return read_frames(path, **{"clip": "tape/7", "expected": EXPECTED, "start": 1, "frames": 3, **options})  # type: ignore[arg-type]


def store(path: Path, latents: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, latents.numpy())
    elif path.suffix == ".pt":
        torch.save(latents, path)
    else:
        save_file({"anything": latents.contiguous()}, path)
    return path


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
def test_a_window_is_read_as_it_was_stored(tmp_path: Path, latents: torch.Tensor, name: str) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        window = read(store(tmp_path / name, latents.to(dtype)))
        assert window.dtype == dtype
        assert window.is_contiguous()
        assert torch.equal(window, latents.to(dtype)[:, 1:4])


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
def test_a_declared_layout_is_honoured(tmp_path: Path, latents: torch.Tensor, name: str) -> None:
    path = store(tmp_path / name, latents.permute(1, 2, 3, 0).contiguous())
    assert torch.equal(read(path, layout="THWC"), latents[:, 1:4])
    assert read_shape(path, clip="c", layout="THWC") == (3, 6, 4, 5)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
def test_an_undeclared_other_layout_is_refused_not_guessed(tmp_path: Path, latents: torch.Tensor, name: str) -> None:
    path = store(tmp_path / name, latents.permute(1, 2, 3, 0).contiguous())
    with pytest.raises(UserError, match=r"clip tape/7 .*length_frames 6 in the manifest, 4 in the file.*declare the"):
        read(path)


def test_the_file_may_declare_its_layout_and_must_not_contradict_the_source(
    tmp_path: Path, latents: torch.Tensor
) -> None:
    stored = latents.permute(1, 2, 3, 0).contiguous()
    save_file({"x": stored}, tmp_path / "a.safetensors", metadata={"layout": "THWC"})
    assert torch.equal(read(tmp_path / "a.safetensors"), latents[:, 1:4])
    with pytest.raises(UserError, match="declares layout CTHW but the file says THWC"):
        read(tmp_path / "a.safetensors", layout="CTHW")
    save_file({"x": stored}, tmp_path / "b.safetensors", metadata={"layout": "HWTC"})
    with pytest.raises(UserError, match="layout HWTC; only CTHW and THWC"):
        read(tmp_path / "b.safetensors")
    torch.save({"latents": stored, "layout": "THWC"}, tmp_path / "c.pt")
    assert torch.equal(read(tmp_path / "c.pt"), latents[:, 1:4])


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Expected(7, 4, 5), "length_frames 7 in the manifest, 6 in the file"),
        (Expected(6, 5, 5), "height 5 in the manifest, 4 in the file"),
        (Expected(6, None, 4), "width 4 in the manifest, 5 in the file"),
    ],
)
def test_a_tensor_that_is_not_what_the_manifest_says_is_refused(
    tmp_path: Path, latents: torch.Tensor, name: str, expected: Expected, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(store(tmp_path / name, latents), expected=expected)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_naming_the_clip(
    tmp_path: Path, latents: torch.Tensor, name: str, value: float
) -> None:
    latents[1, 2, 3, 4] = value
    path = store(tmp_path / name, latents)
    with pytest.raises(UserError, match=r"clip tape/7 .*1 of 180 values in frames 1..3 are NaN or infinite"):
        read(path)
    assert torch.isfinite(read(path, start=3)).all()


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt"])
def test_integers_wrong_ranks_and_damage_are_refused(tmp_path: Path, latents: torch.Tensor, name: str) -> None:
    with pytest.raises(UserError, match="not floating"):
        read(store(tmp_path / name, latents.to(torch.int32)))
    with pytest.raises(UserError, match=r"shape \[6, 4, 5\], not four axes"):
        read(store(tmp_path / name, latents[0]))
    path = store(tmp_path / name, latents)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(UserError, match="not a readable"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a readable"):
        read(path)
    path.unlink()
    with pytest.raises(UserError, match="the file does not exist"):
        read(path)


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["torch", "pickle", "npy"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "was here"
    path = tmp_path / ("a.npy" if kind == "npy" else "a.pt")
    if kind == "torch":
        torch.save({"latents": _Payload(mark)}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(_Payload(mark)))
    else:
        np.save(path, np.array([_Payload(mark)], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"clip tape/7"):
        read(path)
    assert not mark.exists()


def test_a_dictionary_must_say_which_tensor_is_meant(tmp_path: Path, latents: torch.Tensor) -> None:
    torch.save({"video_latents": latents, "other": latents + 1}, tmp_path / "a.pt")
    assert torch.equal(read(tmp_path / "a.pt"), latents[:, 1:4])
    torch.save({"one": latents, "two": latents + 1}, tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"\(one, two\); name one of them video_latents"):
        read(tmp_path / "b.pt")
    torch.save([latents], tmp_path / "c.pt")
    with pytest.raises(UserError, match="holds a list, not a tensor"):
        read(tmp_path / "c.pt")


def test_the_checksum_is_compared_when_asked(tmp_path: Path, latents: torch.Tensor) -> None:
    path = store(tmp_path / "a.npy", latents)
    assert read(path, digest=sha256(path)).shape == (3, 3, 4, 5)
    with pytest.raises(UserError, match="SHA-256 is not the manifest's"):
        read(path, digest="0" * 64)


def test_what_is_written_declares_its_layout_and_reads_back(tmp_path: Path, latents: torch.Tensor) -> None:
    path = tmp_path / "sub" / "a.safetensors"
    write_sidecar(path, latents.to(torch.bfloat16), metadata={"codec": "x"})
    assert sidecar_metadata(path) == {"codec": "x", "layout": "CTHW"}
    assert torch.equal(read(path), latents.to(torch.bfloat16)[:, 1:4])
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
    path.write_bytes(path.read_bytes()[:20])
    assert sidecar_metadata(path) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_only_floating_latents_are_read(tmp_path: Path, latents: torch.Tensor, dtype: torch.dtype) -> None:
    for name in ("a.safetensors", "a.pt"):
        with pytest.raises(UserError, match="not floating; store"):
            read(store(tmp_path / name, latents.to(dtype)))
    for name in ("a.safetensors", "a.pt"):
        assert torch.equal(read(store(tmp_path / name, latents.bfloat16())), latents.bfloat16()[:, 1:4])


def test_arrays_of_another_byte_or_axis_order_are_read_for_what_they_hold(
    tmp_path: Path, latents: torch.Tensor
) -> None:
    for array in (latents.numpy().astype(">f4"), np.asfortranarray(latents.numpy())):
        np.save(tmp_path / "a.npy", array)
        assert torch.equal(read(tmp_path / "a.npy"), latents[:, 1:4])


def test_a_stored_parameter_is_read_without_its_gradient(tmp_path: Path, latents: torch.Tensor) -> None:
    torch.save(torch.nn.Parameter(latents), tmp_path / "a.pt")
    window = read(tmp_path / "a.pt")
    assert not window.requires_grad
    assert torch.equal(window, latents[:, 1:4])


def test_tensors_that_are_not_dense_and_layouts_that_are_no_name_are_refused(
    tmp_path: Path, latents: torch.Tensor
) -> None:
    for stored, message in (
        (latents.to_sparse(), "is torch.sparse_coo, not dense"),
        (latents.to("meta"), "is meta, not dense"),
        ({"latents": latents, "layout": 3}, "declares layout 3; only CTHW and THWC"),
        ({}, "several tensors or none"),
        (None, "holds a NoneType"),
        (latents.numpy(), "loading could run code"),
    ):
        torch.save(stored, tmp_path / "a.pt")
        with pytest.raises(UserError, match=message):
            read(tmp_path / "a.pt")


def npy(shape: str, descr: str = "'<f4'") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(1440)


def tensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(1440)


HEADER = '{"x": {"dtype": "F32", "shape": [3, 6, 4, %s], "data_offsets": [0, 1440]}%s}'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", npy("(3, 6, 400000000000, 500000)")),
        ("a.npy", npy("(3, 6, 4, 500000)")),
        ("a.npy", npy("(9999999999999999999999, 1, 1, 1)")),
        ("a.npy", npy("(-3, -6, 4, 5)")),
        ("a.npy", npy("(True, 6, 4, 5)")),
        ("a.npy", npy("(3, 6, 4, 5)", "[('a', '<f4'")),
        ("a.npy", npy("(3, 6, 4, 5)", "'|O'")),
        ("a.safetensors", tensors(HEADER % ("500000000000", ""))),
        ("a.safetensors", tensors(HEADER % ("5", ', "__metadata__": {"marey": "[1]"}'))),
        ("a.safetensors", tensors(HEADER % ("5", ', "__metadata__": {"marey": "not JSON"}'))),
        ("a.safetensors", (2**60).to_bytes(8, "little") + b"{}"),
        ("a.pt", b"hello"),
    ],
)
def test_a_header_that_promises_what_is_not_there_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"clip tape/7 .*not a readable \{path.suffix} file \("):
        read(path)
    assert sidecar_metadata(path) is None
    with pytest.raises(UserError):
        read_shape(path, clip="c")


def test_an_archive_of_arrays_is_not_an_array(tmp_path: Path, latents: torch.Tensor) -> None:
    np.savez(tmp_path / "a.npz", x=latents.numpy())
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(UserError, match=r"it is an archive of arrays \(.npz\), not one"):
        read(tmp_path / "a.npy")


def refusal_of(path: Path) -> str:
    """Why a file is refused; empty where it is read."""
    try:
        assert read(path).shape == (3, 3, 4, 5)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.pt", "legacy.pt"])
def test_whatever_is_damaged_is_read_or_refused_and_nothing_else(
    tmp_path: Path, latents: torch.Tensor, name: str
) -> None:
    path = tmp_path / name
    if name == "legacy.pt":
        torch.save(latents, path, _use_new_zipfile_serialization=False)
    else:
        store(path, latents)
    whole = path.read_bytes()
    chance = np.random.default_rng(0)
    refused = 0
    for turn in range(80):
        damaged = bytearray(whole)
        for place in chance.integers(0, [128, 700, len(whole)][turn % 3], size=[1, 3, 20][turn % 3]):
            damaged[min(int(place), len(whole) - 1)] = int(chance.integers(256))
        path.write_bytes(damaged[: chance.integers(len(whole))] if turn % 5 == 0 else damaged)
        reason = refusal_of(path)
        if reason:
            refused += 1
            assert "clip tape/7" in reason
            assert "\n" not in reason
    assert refused > 20


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt"])
@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_a_file_that_vanishes_after_it_was_looked_for_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, digest: str | None
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    with pytest.raises(UserError, match="the file does not exist; restore it"):
        read_frames(tmp_path / f"gone{suffix}", clip="c", expected=Expected(4, 2, 2), start=0, frames=2, digest=digest)
