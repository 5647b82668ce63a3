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
