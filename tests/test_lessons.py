"""The course: lessons run and their stories hold, notebooks are their scripts, exercises can be solved.

What takes minutes is marked `lessons` and run by `make lessons`, which `.ci/run` calls.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "lessons").glob("[0-9]_*.py"))
STUBS = sorted(
    path.stem
    for path in (ROOT / "exercises").glob("*.py")
    if path.stem not in ("grade", "__init__")
)


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# --- lessons --------------------------------------------------------------------------------------


def test_there_are_six_lessons_and_an_introduction() -> None:
    assert [path.stem[0] for path in LESSONS] == list("0123456")


@pytest.mark.lessons
@pytest.mark.parametrize("script", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_and_its_story_holds(script: Path) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr[-2000:]


def cells(script: str) -> list[tuple[str, str]]:
    """The cells of a script in Jupytext's percent format: kind and text."""
    found = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, text = part.split("\n", 1)
        if "[markdown]" in head:
            text = re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)
        found.append(("markdown" if "[markdown]" in head else "code", text.strip()))
    return found


NOTEBOOKS = sorted((ROOT / "lessons").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script_executed(path: Path) -> None:
    script = path.with_suffix(".py")
    notebook = json.loads(path.read_text())
    inside = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    assert inside == cells(script.read_text()), "make notebooks"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"], "no warnings"
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures or script.stem == "0_jax"
    for picture in pictures:
        assert len(picture["metadata"]["image/png"]["alt"]) > 40, "what is seen, in words"
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("script", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_says_what_how_long_and_what_before_and_ends_with_questions(script: Path) -> None:
    text = script.read_text()
    opening = text.split("# %%")[1]
    assert all(f"**{word}.**" in opening for word in ("What it teaches", "How long", "Before"))
    assert "# ## Questions" in text
    linked = re.findall(r"\]\((\w+)\.ipynb\)", text) + re.findall(r"`exercises/(\w+)\.py`", text)
    for name in linked:
        assert any((ROOT / place / f"{name}.py").exists() for place in ("lessons", "exercises")), (
            name
        )


# --- exercises ------------------------------------------------------------------------------------


def verdicts(*arguments: str) -> dict[str, tuple[str, str]]:
    """What the grader says of each exercise: a verdict and a sentence."""
    done = run(ROOT / "exercises" / "grade.py", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"^(\w+) +(right|wrong|missing) *(.*)$", done.stdout, flags=re.MULTILINE)
    return {name: (verdict, sentence) for name, verdict, sentence in lines}


def test_every_stub_fails_with_a_helpful_sentence() -> None:
    graded = verdicts()
    assert sorted(graded) == STUBS and len(STUBS) >= 10
    for name, (verdict, sentence) in graded.items():
        assert verdict == "missing", name
        assert re.fullmatch(r"\w+ is not written yet\. A hint: .{20,}[.?]", sentence), name


@pytest.mark.lessons
def test_every_solution_passes() -> None:
    graded = verdicts("--solutions")
    assert sorted(graded) == STUBS
    assert {name: found for name, found in graded.items() if found[0] != "right"} == {}


WRONG = {
    "spread": ("def spread(d):\n    return 0.4", "spread of a single episode"),
    "dispersion": (
        "def dispersion(d):\n    return 2 * d.std()",
        "dispersion of 0 and 2: 2 should be 1.",
    ),
    "geometric_median": ("def geometric_median(points):\n    points.mean()", "you return nothing"),
    "interleaving": (
        "import jax.numpy as jnp\ndef interleave(bd, o, a):\n    return jnp.concatenate([bd, o, a])",
        "interleave of three sequences of five steps: ",
    ),
    "causal_mask": (
        "import jax.numpy as jnp\ndef visible(n):\n    return jnp.ones((n, n), bool)",
        "the first token sees itself alone",
    ),
    "soft_criterion": (
        "def soft_criterion(price):\n    return 1 / 0",
        "ZeroDivisionError in line 2: division by zero",
    ),
    "insertion": ("def insert(offers)\n    return {}, 0", "SyntaxError in line 1"),
}


def test_a_wrong_answer_is_told_what_is_wrong(tmp_path: Path) -> None:
    """Graded as a student would have it: the grader beside the answers."""
    grader = tmp_path / "grade.py"
    grader.write_text((ROOT / "exercises" / "grade.py").read_text())
    for name, (answer, _) in WRONG.items():
        (tmp_path / f"{name}.py").write_text(answer)
    done = run(grader, *WRONG, "key_value_cache")
    for name, (_, sentence) in WRONG.items():
        assert re.search(rf"^{name} +wrong +.*{re.escape(sentence)}", done.stdout, re.MULTILINE), (
            done.stdout
        )
    assert "there is no key_value_cache.py here" in done.stdout
    refused = run(grader, "spraed")
    assert refused.returncode == 2 and "there is no exercise spraed" in refused.stderr
