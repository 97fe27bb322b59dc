"""Documentation that cannot rot: what it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def defined_in(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_symbol_that_a_page_names_exists(page: Path):
    text = page.read_text()
    for file, symbol in re.findall(r"`(\w+\.py)::(\w+)`", text):
        assert symbol in defined_in(ROOT / file), f"{file}::{symbol}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for file in re.findall(r"`((?:benchmarks/|tests/)?\w+\.py)`", text):
        assert (ROOT / file).exists() or (ROOT / "benchmarks" / file).exists(), file


def test_every_module_is_in_the_readme_and_installed():
    modules = sorted(path.name for path in ROOT.glob("*.py"))
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    for name in modules:
        assert f"`{name}`" in readme, name
        assert f'"{name.removesuffix(".py")}"' in project, name


def test_the_readme_shows_how_a_task_is_added_as_it_is_in_the_code():
    example = re.search(
        r"class Walker2dUni\(UniTask\):\n    .*\n", (ROOT / "README.md").read_text()
    )
    assert example and example[0] in (ROOT / "envs.py").read_text()
