"""Conditioning text: a small built-in hashing encoder, and embeddings computed beforehand by a real one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import save

from marey.config.causal import TextConfig
from marey.core.errors import UserError
from marey.core.files import atomic_write
from marey.core.keys import rng
from marey.core.mixing import text_key, text_keys

_TOKEN = re.compile(r"\w+|[^\w\s]")
BLANK = ""
FORMAT = "marey text index 1"


@lru_cache(maxsize=4096)
def _word(token: str, width: int) -> torch.Tensor:
    drawn = rng(text_key(token), "text-token", width).standard_normal(width)
    return torch.from_numpy((drawn / np.linalg.norm(drawn) * width**0.5).astype(np.float32))


class HashingTextEncoder:
    """Words to fixed random directions, the same on every machine; for demonstrations, it knows no meaning.

    A text is lower-cased and split into words and marks; token i of the text is the direction of its word
    plus a sinusoidal code of i (Vaswani et al. 2017, arXiv 1706.03762), so that order is seen. Texts beyond
    ``token_limit`` tokens are cut.
    """

    def __init__(self, *, width: int, token_limit: int) -> None:
        assert width >= 2, width
        assert token_limit >= 1, token_limit
        self.width, self.token_limit = width, token_limit
        self.fingerprint = f"hashing-1 width={width} token_limit={token_limit}"

    def encode(self, text: str, *, clip: str = "") -> torch.Tensor:  # noqa: ARG002
        """float32 ``[L, width]``, L = tokens of the text, at least 1 (a text without any is blank)."""
        tokens = _TOKEN.findall(text.lower())[: self.token_limit] or [BLANK]
        words = torch.stack([_word(token, self.width) for token in tokens])
        return words + _places(len(tokens), self.width)

    def blank(self) -> torch.Tensor:
        """float32 ``[1, width]``: the embedding of the empty text."""
        return self.encode(BLANK)


def _places(length: int, width: int) -> torch.Tensor:
    half = (width + 1) // 2
    frequencies = torch.pow(10000.0, -torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width].to(torch.float32)


def write_text_index(
    path: Path | str, entries: Iterable[tuple[str, torch.Tensor]], *, encoder: str, token_limit: int
) -> int:
    """Store embeddings ``(text, floating [L, D])`` as one safetensors index; returns how many texts it holds.

    ``encoder`` is the fingerprint of the model that made them. The empty text, if among them, is the blank
    embedding. Raises UserError for a repeated text, an uneven width, more than ``token_limit`` tokens, or values
    that are not floating and finite.
    """
    texts: list[str] = []
    rows: list[torch.Tensor] = []
    for text, embedding in entries:
        if embedding.ndim != 2 or not 1 <= len(embedding) <= token_limit or embedding.shape[1] < 1:
            raise UserError(
                f"{path}: the embedding of text {text!r} has shape {list(embedding.shape)}, not [L, D] with "
                f"1 <= L <= {token_limit} and D >= 1; encode it with that token limit."
            )
        if not embedding.is_floating_point() or not bool(torch.isfinite(embedding).all()):
            raise UserError(
                f"{path}: the embedding of text {text!r} ({embedding.dtype}) is not floating and finite; encode it "
                "again."
            )
        if rows and embedding.shape[1] != rows[0].shape[1]:
            raise UserError(
                f"{path}: the embedding of text {text!r} is {embedding.shape[1]} wide, others {rows[0].shape[1]}; "
                "use one encoder for one index."
            )
        texts.append(text)
        rows.append(embedding.detach())
    if not rows:
        raise UserError(f"{path}: there is no text to store; give at least one.")
    keys = text_keys(texts)
    order = np.argsort(keys, kind="stable")
    if len(np.unique(keys)) != len(keys):
        again = next(text for i, text in enumerate(texts) if text in texts[:i])
        raise UserError(f"{path}: text {again!r} is given twice; store each text once.")
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(rows[i]) for i in order]).cumsum(0)
    tensors = {
        "embeddings": torch.cat([rows[i] for i in order]).contiguous(),
        "keys": torch.from_numpy(keys[order].view(np.int64).copy()),
        "offsets": offsets,
    }
    metadata = {"format": FORMAT, "encoder": encoder, "token_limit": str(token_limit)}
    with atomic_write(path) as file:
        file.write(save(tensors, metadata=metadata))
    return len(rows)


def _damage(
    metadata: dict[str, str], keys: torch.Tensor, offsets: torch.Tensor, shape: list[int], kind: str, token_limit: int
) -> str | None:
    """What is not as :func:`write_text_index` writes it, if anything; ``token_limit`` is the one asked for."""
    if not {"encoder", "token_limit"} <= metadata.keys():
        return "it does not name its encoder and token limit"
    if keys.dtype != torch.int64 or offsets.dtype != torch.int64 or keys.ndim != 1 or offsets.ndim != 1:
        return "keys and offsets are not rows of int64"
    if len(shape) != 2 or shape[1] < 1 or kind not in ("F16", "BF16", "F32", "F64"):
        return f"embeddings are {kind} {shape}, not floating [tokens, D]"
    if len(offsets) != len(keys) + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != shape[0]:
        return f"offsets do not divide {shape[0]} tokens among {len(keys)} texts"
    lengths = offsets.diff()
    if len(keys) == 0 or int(lengths.min()) < 1:
        return "a text has no token"
    if metadata["token_limit"] == str(token_limit) and int(lengths.max()) > token_limit:
        return f"a text has {int(lengths.max())} tokens, more than the limit of {token_limit}"
    ordered = keys.numpy().view(np.uint64)
    if not bool((ordered[1:] > ordered[:-1]).all()):
        return "keys are not in order"
    return None


class PrecomputedText:
    """Embeddings by text from an index file, checked against the encoder and the token limit that a run asks for.

    Raises UserError for a file that is no index or a damaged one, and for another encoder or token limit.
    """

    def __init__(self, path: Path | str, *, encoder: str, token_limit: int) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"data.text.index={self.path}: no such file; write it with the text encoder first.")
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
                if metadata.get("format") != FORMAT:
                    raise UserError(f"{self.path}: not a text index ({FORMAT}); write it with write_text_index.")
                keys, offsets = file.get_tensor("keys"), file.get_tensor("offsets")
                embeddings = file.get_slice("embeddings")
                shape, kind = embeddings.get_shape(), embeddings.get_dtype()
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{self.path}: not a readable text index ({error}); write it again.") from None
        problem = _damage(metadata, keys, offsets, shape, kind, token_limit)
        if problem is not None:
            raise UserError(f"{self.path}: a damaged text index ({problem}); write it again.")
        self._keys = keys.numpy().view(np.uint64)
        self._offsets = offsets.numpy()
        self.width = int(shape[1])
        for key, asked, found in (
            ("encoder", encoder, metadata["encoder"]),
            ("token_limit", str(token_limit), metadata["token_limit"]),
        ):
            if asked != found:
                raise UserError(
                    f"{self.path}: data.text.{key} asks for {asked} but the index was written with {found}; "
                    "change the key or encode the texts again."
                )
        self.fingerprint = f"{encoder} token_limit={token_limit}"

    def encode(self, text: str, *, clip: str) -> torch.Tensor:
        """float32 ``[L, width]``. Raises UserError naming the clip when the index does not hold its text."""
        key = text_keys([text])[0]
        place = int(np.searchsorted(self._keys, key))
        if place == len(self._keys) or self._keys[place] != key:
            what = "no blank embedding (that of the empty text)" if text == BLANK else f"not the text {text!r}"
            raise UserError(f"{self.path}: the index holds {what}, needed for {clip}; encode it and add it.")
        first, last = int(self._offsets[place]), int(self._offsets[place + 1])
        with safetensors.safe_open(self.path, framework="pt") as file:
            stored: torch.Tensor = file.get_slice("embeddings")[first:last]
        if not bool(torch.isfinite(stored).all()):
            raise UserError(
                f"{self.path}: the embedding of {text!r}, needed for {clip}, is not finite; encode it again."
            )
        return stored.to(torch.float32)

    def blank(self) -> torch.Tensor:
        """float32 ``[L, width]``. Raises UserError when the index holds no embedding of the empty text."""
        return self.encode(BLANK, clip="text dropout")


def configured_encoder(text: TextConfig) -> HashingTextEncoder | PrecomputedText:
    """What turns texts into conditioning tokens. Raises UserError for an index that does not fit."""
    if text.index is None:
        return HashingTextEncoder(width=text.width, token_limit=text.token_limit)
    return PrecomputedText(Path(text.index).expanduser(), encoder=text.encoder, token_limit=text.token_limit)


def label_text(label: int, names: Sequence[str] | None) -> str | None:
    """The text that a clip of a store is conditioned on: its label, by name where there are names; None below 0."""
    if label < 0:
        return None
    return names[label] if names else str(label)
