"""Every command that a page tells people to type exists, with its options, its keys and their values."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from marey import cli
from tests.docs.checks import check, check_span, configured, is_override, keys, keys_of
from tests.docs.pages import PAGES, ROOT, Block, Words, blocks, commands, is_shell, spans

COMMANDS = [command for page in PAGES for command in commands(page)]
SPANS = [span for page in PAGES for span in spans(page)]
COMMENT_IN_A_CHECKPOINT = ("marey", "sha256")
PATTERNS = {"PATH", "NAME", "EXPR"}
"""Words that stand for others."""
FILES = (".safetensors", ".py", ".json", ".yaml", ".csv", ".ckpt", ".parquet", ".txt")
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def wrong(candidates: Sequence[Words], examine: Callable[[Sequence[str]], None]) -> list[str]:
    """Each command that is wrong, and why."""
    found = []
    for command in candidates:
        try:
            examine(command.words)
        except (AssertionError, SystemExit, KeyError, IndexError) as error:
            found.append(f"{command}\n    {error}")
    return found


def test_commands_in_blocks_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) > 40  # the pages are read at all
    problems = wrong(COMMANDS, check)
    assert not problems, "\n".join([*problems, capsys.readouterr().err])


def test_a_wrong_command_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        "marey ingests a b.lance",
        "marey ingest a b.lance --speed 3",
        "marey train loader.batchsize=3",
        "marey train trainer.max_steps=many",
        "marey train recipe=walking",
        "marey doctor a.lance model.nmae=vit_tiny",
        "python benchmarks/absent.py",
        "python benchmarks/planner.py --mix 8x8",
        "python -m pytest tests/absent",
        "python -m pytest tests/docs/test_commands.py -k nothing_like_it",
        "torchrun --nodes=2 main.py",
        "torchrun --nnodes=2 main.py seeed=1",
        "make tests",
        "rm -rf data",
    ):
        assert wrong([Words(ROOT / "README.md", 1, tuple(line.split()))], check), line


def test_shell_blocks_are_shell() -> None:
    for page in PAGES:
        for block in blocks(page):
            if is_shell(block):
                done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{page.name}:{block.line}: {done.stderr}"


def _plans() -> Iterator[Words]:
    yield from (command for command in COMMANDS if command.words[:2] == ("marey", "plan"))
    for span in SPANS:
        if span.words[:2] == ("marey", "plan") and all(is_override(word) for word in span.words[2:]):
            yield span


PLANS = sorted({plan.words for plan in _plans() if not any(word.partition("=")[2] in PATTERNS for word in plan.words)})


@pytest.mark.parametrize("words", PLANS, ids=lambda words: " ".join(words[2:]) or "defaults")
def test_plans_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "differs" in planned(words, tmp_path, monkeypatch, capsys)


def planned(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a plan prints in an empty folder."""
    monkeypatch.chdir(tmp_path)
    cli.main(list(words[1:]))
    return capsys.readouterr().out


def _shown() -> Iterator[tuple[Block, tuple[str, ...]]]:
    """Blocks of output, and the plan named right before each."""
    for page in PAGES:
        for block in blocks(page):
            found = re.findall(r"(marey plan(?: [\w.]+=[^\s`]+)*)`?[^`]*(?:```\n)?\s*$", block.before[-600:])
            if block.language == "text" and found:
                yield block, tuple(found[-1].split())


SHOWN = list(_shown())


@pytest.mark.parametrize(("block", "words"), SHOWN, ids=[f"{block.page.name}:{block.line}" for block, _ in SHOWN])
def test_plans_print_what_the_pages_show(
    block: Block,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = iter(planned(words, tmp_path, monkeypatch, capsys).splitlines())
    for line in filter(None, block.text.splitlines()):
        assert line in printed, f"{block.page.name}:{block.line}: not printed, or not in this order: {line}"


def test_the_output_blocks_of_the_pages_were_found() -> None:
    texts = [block for page in PAGES for block in blocks(page) if block.language == "text"]
    assert len(texts) >= 3
    assert [block for block, _ in SHOWN] == texts


def test_commands_and_tests_in_running_text_exist(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [span for span in SPANS if not PATTERNS & set(span.words) and span.words != COMMENT_IN_A_CHECKPOINT]
    problems = wrong(candidates, check_span)
    assert not problems, "\n".join([*problems, capsys.readouterr().err])


def test_keys_in_running_text_exist() -> None:
    """``key=value``, ``key: value`` and dotted keys whose first part is a section."""
    sections = {key.partition(".")[0] for key in keys() if "." in key}
    problems = []
    for span in SPANS:
        for word in span.words:
            key = re.split(r"[=:]", word, maxsplit=1)[0].lstrip("+")
            if key.endswith(FILES):
                continue
            named = _KEY.fullmatch(key) and key.partition(".")[0] in sections - {"resume", "data"}
            typed = _KEY.fullmatch(key) and "=" in word
            if (named or typed) and key not in keys() and not key.startswith("data.codec.options."):
                problems.append(f"{span}: {key} is not a key")
    assert not problems, "\n".join(problems)


def unreadable(words: tuple[str, ...], config_name: str) -> str | None:
    """The refusal of a key or a value by itself; that it needs another one beside it is no fault of a page."""
    refusal = configured(words, config_name)
    return (
        refusal if refusal and re.search(r"is not a key|is not allowed|does not exist|cannot read", refusal) else None
    )


def test_values_in_running_text_are_allowed() -> None:
    """Spans that hold ``key=value`` words alone are words of a run, of one objective at least."""
    problems, seen = [], 0
    for span in SPANS:
        typed = [re.fullmatch(r"([\w.]+)=([^=]+)", word) for word in span.words]
        if not all(
            match and match[1] in keys() and not PATTERNS & {match[2]} and "..." not in match[2] for match in typed
        ):
            continue
        seen += 1
        causal = any(match and match[1] not in keys_of("config") for match in typed)
        refusal = unreadable(("data=demo", *span.words), "causal_video") if causal else unreadable(span.words, "config")
        if refusal:
            problems.append(f"{span}: {refusal}")
    assert seen > 40
    assert not problems, "\n".join(problems)
