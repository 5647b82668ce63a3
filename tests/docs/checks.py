"""What has to be true of a command, a test, a script or a key that a page names."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from hydra._internal.utils import get_args_parser

from marey import cli
from marey.config.compose import known_keys, load_run
from marey.core.errors import UserError
from tests.docs.pages import ROOT

BENCHMARKS = ROOT / "benchmarks"
OTHERS_OPTIONS = {"--gpus-per-node", "--nodes", "--ntasks-per-node", "--signal"}
"""SLURM's, which pages name too."""


def is_override(word: str) -> bool:
    return re.match(r"[\w.@+~]+=", word) is not None


@cache
def configured(words: tuple[str, ...], config_name: str) -> str | None:
    """Why the words are no run, or None."""
    try:
        load_run(list(words), config_name=config_name)
    except UserError as refusal:
        return str(refusal)
    return None


GROUPS = {"config": {"recipe"}, "causal_video": {"causal_recipe"}}
HYDRAS = {"data", "hydra.run.dir", "hydra.job.chdir"}


@cache
def keys_of(config_name: str) -> frozenset[str]:
    """What may be set in a configuration: its keys, sections and groups."""
    parts = [key.split(".") for key in known_keys(config_name)]
    return frozenset(
        {".".join(key[:n]) for key in parts for n in range(1, len(key) + 1)} | GROUPS[config_name] | HYDRAS
    )


def keys() -> frozenset[str]:
    """What may be set in one configuration at least."""
    return keys_of("config") | keys_of("causal_video")


@cache
def script_options(script: Path) -> frozenset[str]:
    """The options that a script declares."""
    return frozenset(
        argument.value
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


def check_train(words: Sequence[str]) -> None:
    """The words after ``marey train``: Hydra's options, then keys and values of a run."""
    options = get_args_parser().parse_args([word for word in words if word != "--debug"])
    if options.config_dir is None:
        refusal = configured(tuple(options.overrides), options.config_name or "config")
        assert refusal is None, refusal


def check_marey(words: Sequence[str]) -> None:
    """The words after ``marey``."""
    if words[:1] == ["train"]:
        check_train(words[1:])
        return
    arguments = cli._parser().parse_args([word for word in words if word != "--debug"])
    named = [word for word in (*_list(arguments, "overrides"), *_list(arguments, "data")) if is_override(word)]
    if named and arguments.command != "plan":  # a plan is run, below
        refusal = configured(tuple(named), getattr(arguments, "config_name", None) or "config")
        assert refusal is None, refusal


def _list(arguments: argparse.Namespace, name: str) -> list[str]:
    value = getattr(arguments, name, None)
    return value if isinstance(value, list) else []


def check_pytest(words: Sequence[str]) -> None:
    """``PATH... [-k EXPRESSION]``: files exist, and the expression selects a test of them."""
    from _pytest.mark.expression import Expression

    words = [word for word in words if word not in ("-q", "-x", "-rs")]
    expression = None
    if "-k" in words:
        at = words.index("-k")
        expression, words = Expression.compile(words[at + 1]), [*words[:at], *words[at + 2 :]]
    tests = [test for word in words for file in files_of(word) for test in functions_of(file)]
    assert tests, "no such test"
    if expression is not None:
        assert any(expression.evaluate(matcher(test)) for test in tests), "the expression selects no test"


def matcher(test: str) -> Callable[..., bool]:
    """pytest's own rule: a word of ``-k`` is looked for in the names of file and function."""
    return lambda word, **_: word.lower() in test.lower()


def files_of(word: str) -> list[Path]:
    """The files that a path means; a bare name may lie in any folder of the tests."""
    named = ROOT / word if "/" in word else next(iter((ROOT / "tests").rglob(word)), ROOT / "tests" / word)
    assert named.exists(), f"{word} does not exist"
    return sorted(named.rglob("test_*.py")) if named.is_dir() else [named]


@cache
def functions_of(file: Path) -> tuple[str, ...]:
    """``file::function`` of every test."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return tuple(f"{file.name}::{name}" for name in functions if name.startswith("test_"))


def check_benchmarks(words: Sequence[str]) -> None:
    """The words after ``python -m benchmarks``."""
    unknown = [word for word in words if word.startswith("-") and word not in script_options(BENCHMARKS / "runner.py")]
    assert not unknown, f"benchmarks has no option {unknown[0]}"
    known = {"all", "list", "tables", *(script.stem for script in BENCHMARKS.glob("*.py"))}
    assert words[0] in known, f"there is no benchmark {words[0]}"


def check_python(words: Sequence[str]) -> None:
    """The words after ``python``."""
    words = list(words)
    if words[:2] == ["-m", "pytest"]:
        check_pytest(words[2:])
    elif words[:2] == ["-m", "marey"]:
        check_marey(words[2:])
    elif words[:2] == ["-m", "benchmarks"]:
        check_benchmarks(words[2:])
    elif words[:1] == ["-m"] and words[1].startswith("marey."):
        module = (ROOT / "src" / Path(*words[1].split("."))).with_suffix(".py")
        assert module.is_file(), f"{words[1]} is no module"
        assert 'if __name__ == "__main__"' in module.read_text(encoding="utf-8"), f"{words[1]} is no program"
    elif words[:1] == ["main.py"]:
        check_train(words[1:])
    else:
        script = ROOT / words[0]
        assert script.is_file(), f"{words[0]} does not exist"
        unknown = [word for word in words[1:] if word.startswith("--") and word not in script_options(script)]
        assert not unknown, f"{words[0]} has no option {unknown[0]}"


def check_torchrun(words: Sequence[str]) -> None:
    """torchrun's own options, by its own parser, then what it starts."""
    from torch.distributed.run import get_args_parser as launcher

    given = launcher().parse_args(list(words))
    started = [given.training_script, *given.training_script_args]
    check_python(["-m", *started] if given.module else started)


def check_make(words: Sequence[str]) -> None:
    """Targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        assert is_override(word) or re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"no target {word}"


def check(words: Sequence[str]) -> None:
    """One command, whatever it is; what this does not know may not stand in the documentation."""
    if words[0] == "srun":
        words = words[1:]
    program, rest = Path(words[0]).name, list(words[1:])
    if program == "uv":
        program, rest = Path(rest[1]).name, rest[2:]
    known = {"marey": check_marey, "python": check_python, "torchrun": check_torchrun, "make": check_make}
    assert program in known or list(words) == ["source", ".venv/bin/activate"], f"{program}: not a command of ours"
    if program in known:
        known[program](rest)


@cache
def marey_options() -> dict[str, frozenset[str]]:
    """The options of every command; those of ``train`` are Hydra's."""
    subparsers = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    subcommands: dict[str, argparse.ArgumentParser] = subparsers.choices
    hydras = {option for action in get_args_parser()._actions for option in action.option_strings}
    found = {name: set(parser._option_string_actions) for name, parser in subcommands.items()} | {"train": hydras}
    return {name: frozenset(options | {"--debug"}) for name, options in found.items()}


def check_span(words: Sequence[str]) -> None:
    """A command, a test, a script or options named in running text: it need not be complete, it must exist."""
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if words[0] == "marey" and len(words) > 1 and not words[1].startswith(("-", "...")):
        assert words[1] in marey_options(), f"no command {words[1]}"
        unknown = [option for option in options if option not in marey_options()[words[1]]]
        assert not unknown, f"marey {words[1]} has no option {unknown[0]}"
    elif words[0].startswith("--"):
        scripts = [script_options(script) for script in BENCHMARKS.glob("*.py")]
        have = OTHERS_OPTIONS.union(*marey_options().values(), *scripts)
        unknown = [option for option in options if option not in have]
        assert not unknown, f"no command has the option {unknown[0]}"
    elif words[0] == "$P":
        check_pytest(words[1:])
    elif words[0] in ("python", ".venv/bin/python") and len(words) > 1 and words[-1] != "...":
        check_python(words[1:])
    elif re.search(r"(^|/)test_\w+\.py$", words[0]):
        check_pytest(words)
