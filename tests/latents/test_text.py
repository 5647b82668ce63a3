from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from marey.core.errors import UserError
from marey.latents.text import HashingTextEncoder, PrecomputedText, write_text_index


def test_the_hashing_encoder_is_the_same_everywhere() -> None:
    embedding = HashingTextEncoder(width=4, token_limit=8).encode("Push the cup")
    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding, torch.tensor(EXPECTED), rtol=0, atol=1e-5)


EXPECTED = [
    [0.36407, 1.49056, 2.22418, 1.38349],
    [1.45539, 1.55247, 0.29046, 2.0869],
    [-0.87389, 0.70209, -0.58134, 1.57226],
]


def test_words_marks_order_and_limit_matter_and_case_does_not() -> None:
    encoder = HashingTextEncoder(width=32, token_limit=4)
    assert encoder.encode("Pick, place").shape == (3, 32)
    assert torch.equal(encoder.encode("PICK, place"), encoder.encode("pick, place"))
    assert not torch.equal(encoder.encode("cup on box"), encoder.encode("box on cup"))
    assert encoder.encode("a b c d e f").shape == (4, 32)
    assert torch.equal(encoder.encode("a b c d e f"), encoder.encode("a b c d"))


def test_text_without_a_word_is_blank() -> None:
    encoder = HashingTextEncoder(width=6, token_limit=4)
    assert encoder.blank().shape == (1, 6)
    assert torch.equal(encoder.encode("  \n"), encoder.blank())


def index(tmp_path: Path, **changes: object) -> PrecomputedText:
    path = tmp_path / "text.safetensors"
    if not path.exists():
        entries = [("one", torch.full((2, 3), 1.0)), ("two, three", torch.full((4, 3), 2.0)), ("", torch.zeros(1, 3))]
        assert write_text_index(path, entries, encoder="t5 rev 1", token_limit=4) == 3
    return PrecomputedText(path, **{"encoder": "t5 rev 1", "token_limit": 4, **changes})  # type: ignore[arg-type]


def test_precomputed_embeddings_are_found_by_text(tmp_path: Path) -> None:
    text = index(tmp_path)
    assert torch.equal(text.encode("two, three", clip="c"), torch.full((4, 3), 2.0))
    assert torch.equal(text.encode("one", clip="c"), torch.full((2, 3), 1.0))
    assert torch.equal(text.blank(), torch.zeros(1, 3))
    assert text.width == 3
    with pytest.raises(UserError, match="not the text 'four', needed for clip 9"):
        text.encode("four", clip="clip 9")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "t5 rev 2"}, "data.text.encoder asks for t5 rev 2 but the index was written with t5 rev 1"),
        ({"token_limit": 8}, "data.text.token_limit asks for 8 but the index was written with 4"),
    ],
)
def test_another_encoder_or_token_limit_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        index(tmp_path, **changes)


def test_a_missing_blank_is_refused_when_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_text_index(path, [("one", torch.ones(1, 3))], encoder="e", token_limit=4)
    with pytest.raises(UserError, match="no blank embedding"):
        PrecomputedText(path, encoder="e", token_limit=4).blank()


def test_what_cannot_be_an_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for entries, message in (
        ([], "no text"),
        ([("a", torch.ones(5, 3))], "shape"),
        ([("a", torch.ones(2, 0))], "shape"),
        ([("a", torch.ones(0, 3))], "shape"),
        ([("a", torch.ones(2, 3, dtype=torch.int64))], "not floating and finite"),
        ([("a", torch.ones(1, 3)), ("b", torch.ones(1, 4))], "4 wide"),
        ([("a", torch.ones(1, 3)), ("a", torch.ones(1, 3))], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            write_text_index(path, entries, encoder="e", token_limit=4)
    assert not path.exists()
    with pytest.raises(UserError, match="no such file"):
        PrecomputedText(path, encoder="e", token_limit=4)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable text index"):
        PrecomputedText(path, encoder="e", token_limit=4)


def test_an_embedding_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(UserError, match=r"text 'a' .* is not floating and finite"):
        write_text_index(path, [("a", torch.full((1, 2), float("nan")))], encoder="e", token_limit=4)
    write_text_index(path, [("a", torch.ones(1, 2))], encoder="e", token_limit=4)
    rewrite(path, embeddings=torch.full((1, 2), float("nan")))
    with pytest.raises(UserError, match="'a', needed for c7, is not finite"):
        PrecomputedText(path, encoder="e", token_limit=4).encode("a", clip="c7")


def rewrite(path: Path, metadata: dict[str, str] | None = None, **changes: torch.Tensor) -> None:
    """The index again, with other tensors or metadata in it."""
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        said = file.metadata() if metadata is None else metadata
    save_file({**tensors, **changes}, path, metadata=said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"format": "marey text index 1"}}, "does not name its encoder and token limit"),
        ({"metadata": {}}, "not a text index"),
        ({"keys": torch.tensor([1, 2, 3], dtype=torch.int32)}, "not rows of int64"),
        ({"keys": torch.tensor([3, 2, 1])}, "keys are not in order"),
        ({"keys": torch.tensor([1, 2])}, "do not divide 7 tokens among 2 texts"),
        ({"offsets": torch.tensor([0, 1, 2])}, "do not divide 7 tokens among 3 texts"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, "do not divide 7 tokens"),
        ({"offsets": torch.tensor([0, 3, 3, 7])}, "a text has no token"),
        ({"offsets": torch.tensor([0, 5, 6, 7])}, "a text has 5 tokens, more than the limit of 4"),
        ({"embeddings": torch.ones(8, 3)}, "do not divide 8 tokens"),
        ({"embeddings": torch.ones(7)}, r"embeddings are F32 \[7\], not floating"),
        ({"embeddings": torch.ones(7, 3, dtype=torch.int64)}, r"embeddings are I64 \[7, 3\], not floating"),
    ],
)
def test_a_damaged_index_is_refused_before_anything_is_drawn(
    tmp_path: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    path = index(tmp_path).path
    rewrite(path, **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        PrecomputedText(path, encoder="t5 rev 1", token_limit=4)
