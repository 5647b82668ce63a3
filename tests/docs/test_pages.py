"""Links lead somewhere, examples import what exists, numbers and pictures are what the program computes."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from marey.config.compose import load_config
from marey.core.tokencount import kept_count
from marey.training.batchplan import batch_plan
from tests.docs.pages import EVERYTHING, PAGES, ROOT, Block, anchors, blocks, links, text_of

PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize("page", EVERYTHING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}:{line}: {target} does not exist"
        assert place.is_relative_to(ROOT), f"{page.name}:{line}: {target} leaves the repository"
        if anchor and not anchor.startswith("marey."):  # anchors of docstrings: the site's own check
            assert anchor in anchors(place), f"{page.name}:{line}: {target}: no such heading"


@cache
def names_in(module: str) -> frozenset[str]:
    """What a module of the package defines or imports, read without running it."""
    base = ROOT / "src" / Path(*module.split("."))
    file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
    assert file.is_file(), f"{module} is no module"
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page.name}:{block.line}")
def test_python_examples_import_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("marey"):
            missing = {alias.name for alias in node.names} - names_in(str(node.module))
            assert not missing, f"{node.module} has no {', '.join(missing)}"


def test_names_of_modules_in_running_text_exist() -> None:
    for page in PAGES:
        for module, name in re.findall(r"`(marey(?:\.\w+)+)\.(\w+)(?:\(|`)", text_of(page)):
            if not (ROOT / "src" / Path(*module.split("."), name)).with_suffix(".py").exists() and module != "marey":
                assert name in names_in(module), f"{page.name}: {module} has no {name}"


def test_the_three_answers_have_the_plans_numbers() -> None:
    recipes = text_of(ROOT / "docs" / "recipes.md")
    config = load_config([])
    episodes, clips = 6067, config.loader.clips_per_video
    plan = batch_plan(config, episodes * clips)
    assert (plan.effective_batch, plan.statistic_batch, plan.total_steps) == (3072, 1536, 10_244)
    accumulated = batch_plan(load_config(["trainer.num_nodes=1", "accumulate_grad_batches=4"]), None)
    assert (accumulated.effective_batch, accumulated.statistic_batch) == (3072, 768)
    typed = re.findall(r"^marey train (.*loader.*)$", recipes, re.MULTILINE)
    assert len(typed) == 2
    for line in typed:
        kept = batch_plan(load_config(line.split()), None)
        assert (kept.effective_batch, kept.statistic_batch, kept.norm_group) == (3072, 1536, 96)
    assert plan.total_steps is not None
    updates = plan.total_steps // config.ema.update_every
    steps = updates * config.ema.update_every
    assert f".9999^{steps}, {config.ema.decay**steps:.0%}" in recipes
    assert f"each of the {updates} updates counts as one step, it is {config.ema.decay**updates:.0%}" in recipes
    assert f"{episodes * clips:,} clips" in recipes


def test_the_batching_page_counts_the_tokens_of_the_recipe() -> None:
    config = load_config([])
    views = [(config.model.img_size, 1), (config.augmentation.local_size, config.augmentation.local_crops_number)]
    tokens = [config.model.num_frames * (side // config.model.patch_size) ** 2 for side, _ in views]
    kept = [kept_count(count, config.model.token_drop_rate) for count in tokens]
    many = [number for _, number in views]
    all_of, seen = (sum(n * v for n, v in zip(counts, many, strict=True)) for counts in (tokens, kept))
    assert f"{all_of:,} patches in eleven views, training keeps {seen}" in text_of(ROOT / "docs" / "batching.md")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """docs/make_pictures.py, which is a script."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


def test_the_pictures_are_what_the_library_computes(drawing: ModuleType) -> None:
    drawn = drawing.pictures()
    assert set((ROOT / "docs" / "pictures").iterdir()) == set(drawn)
    for path, text in drawn.items():
        assert path.read_text(encoding="utf-8") == text, "run `python docs/make_pictures.py`"


def test_rectangles_cover_a_matrix_exactly_once(drawing: ModuleType) -> None:
    import torch

    for seed in range(5):
        mask = torch.rand(9, 9, generator=torch.Generator().manual_seed(seed)) < 0.6
        covered = torch.zeros(9, 9, dtype=torch.int64)
        for row, column, rows, columns in drawing.blocks(mask.tolist()):
            covered[row : row + rows, column : column + columns] += 1
        assert torch.equal(covered, mask.long())


def test_the_site_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    silent = {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=silent)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {page.stem for page in EVERYTHING} - {"README"} <= {page.stem for page in pages}
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"', html)
        assert not loaded, f"{page.name} loads {loaded[0]}"
        assert "\n```" not in html, f"{page.name}: a code block that was not closed"
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_the_reference_has_a_docstring_for_every_name() -> None:
    named = re.findall(r"^::: (\S+)$", text_of(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert len(named) == len(set(named)) > 30
    for full in named:
        module, _, name = full.rpartition(".")
        file = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py")
        nodes = [
            node
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
        ]
        assert nodes, f"{full} does not exist"
        assert ast.get_docstring(nodes[0]), f"{full} has no docstring"


def test_headings_of_a_page_are_all_different() -> None:
    for page in PAGES:
        headings = re.findall(r"^#+ .*$", text_of(page), re.MULTILINE)
        code = "\n".join(block.text for block in blocks(page))
        titles = sorted(heading.lstrip("# ") for heading in headings if heading not in code)
        assert all(one != other for one, other in pairwise(titles)), page.name
