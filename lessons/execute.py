"""Executes lessons and writes them as notebooks with their pictures beside the scripts: `make notebooks`.

    python lessons/execute.py            all
    python lessons/execute.py 1_luck     one

The scripts are in Jupytext's percent format. A notebook is made anew each time, never edited.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LARGEST = 500_000  # bytes; a code host does not show what is much larger


def execute(script: Path) -> Path:
    notebook = jupytext.read(script)
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # not random: what did not change makes no difference
    settings = {"timeout": 1200, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources=at(HERE), **settings).execute()
    target = script.with_suffix(".ipynb")
    nbformat.write(notebook, target)
    size = target.stat().st_size
    if size > LARGEST:
        sys.exit(
            f"{target.name} has {size:,} bytes, more than {LARGEST:,}: make its pictures smaller."
        )
    return target


def at(directory: Path) -> dict[str, dict[str, str]]:
    """Where the kernel starts: beside `course.py`."""
    return {"metadata": {"path": str(directory)}}


if __name__ == "__main__":
    names = sys.argv[1:] or [path.stem for path in sorted(HERE.glob("[0-9]_*.py"))]
    for name in names:
        start = time.perf_counter()
        written = execute(HERE / f"{name}.py")
        size, taken = written.stat().st_size / 1000, time.perf_counter() - start
        print(f"{written.name}: {size:.0f} kB, {taken:.0f} s", flush=True)
