"""Documentation that cannot rot: what it names exists."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "lessons" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def defined_in(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_symbol_that_a_page_names_exists(page: Path):
    text = page.read_text()
    for file, symbol in re.findall(r"`((?:\w+/)?\w+\.py)::(\w+)", text):
        assert symbol in defined_in(ROOT / file), f"{file}::{symbol}"
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for file in re.findall(r"`((?:\w+/)?\w+\.(?:py|toml))`", text):
        places = [ROOT, *(ROOT / folder for folder in ("machinery", "benchmarks", "tests"))]
        assert any((place / file).exists() for place in places), file


def test_the_walk_shows_lines_of_the_code():
    """Each block of code begins with the file and the symbol in which its lines stand."""
    shown = re.findall(
        r"```python\n# (\w+\.py)::(\w+)\n(.*?)```", (ROOT / "docs/walk.md").read_text(), re.S
    )
    assert len(shown) > 10
    for file, symbol, block in shown:
        source = (ROOT / file).read_text()
        (node,) = [n for n in ast.parse(source).body if getattr(n, "name", None) == symbol]
        lines = [line.strip() for line in (ast.get_source_segment(source, node) or "").splitlines()]
        wanted = [line.strip() for line in block.splitlines()]
        places = range(len(lines) - len(wanted) + 1)
        assert any(lines[i : i + len(wanted)] == wanted for i in places), f"{file}::{symbol}"


def test_the_version_is_the_same_everywhere():
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert project and citation and project[1] == citation[1]


def test_every_module_is_in_the_readme_and_installed():
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    for path in ROOT.glob("*.py"):
        assert re.search(rf"(?<![\w/]){path.name}\b", readme), path.name
        assert f'"{path.stem}"' in project, path.name
    for path in (ROOT / "machinery").glob("[!_]*.py"):
        assert re.search(rf"`(?:machinery/)?{path.name}`", readme), path.name
    assert 'packages = ["machinery"]' in project


def test_the_readme_shows_how_a_task_is_added_as_it_is_in_the_code():
    example = re.search(
        r"class Walker2dUni\(UniTask\):\n    .*\n", (ROOT / "README.md").read_text()
    )
    assert example and example[0] in (ROOT / "envs.py").read_text()


def test_the_ten_lines_of_the_readme_run_and_draw_a_map(run_python: Callable, tmp_path: Path):
    text = (ROOT / "README.md").read_text()
    example = re.search(r"## Ten lines\n.*?```python\n(.*?)```", text, flags=re.DOTALL)
    assert example is not None
    run_python(f"import os; os.chdir({str(tmp_path)!r})\n" + example[1])
    assert (tmp_path / "map.png").stat().st_size > 5000
