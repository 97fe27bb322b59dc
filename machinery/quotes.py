"""Pages whose numbers are computed: tables and numbers in a Markdown page, from runs beside it.

Between two marks stands a table of the report:

    <!-- table accuracy-ant-omni -->
    <!-- end -->

A number in a sentence is followed by where it comes from, in a comment that no reader sees. Mean over the
seeds (of two methods, their ratio, over the seeds that both have); one seed; what the paper prints; and
anything that is in a file:

    0.39<!-- distance on ant-omni: ME-LS / ME -->
    52 %<!-- coverage on halfcheetah-uni: ME-LS, seed 1 -->
    0.47<!-- paper distance on ant-omni: ME-LS / ME -->
    0.131<!-- ant-omni/seed-0/me-ls/evaluation/generalize.json: result.tiles.mean_distance -->

`fill` brings them up to date, with as many digits as are there; `loose_numbers` finds those that have
no source.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from machinery.files import UserError, read_json
from machinery.gather import Found
from machinery.tables import LOWER_IS_BETTER, all_tables, markdown, printed, values_of

TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"([-−]?\d[\d,]*(?:\.\d+)?)( %)?<!-- ([^>]*?) -->")
QUANTITY = re.compile(r"(paper )?(\w+) on ([\w-]+): (.+?)(?: / (.+?))?(?:, seed (\d+))?")
FILE = re.compile(r"([\w./-]+\.json): ([\w.-]+)")
# What is no result: names of tables, figures and seeds, and what is code.
NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)"
    r"|(?:[Tt]ables?|[Ff]igures?|[Ss]ections?|[Ss]eeds?) \d+(?:(?:, | and | to |–)\d+(?![.\d]| %))*"
)

Runs = Mapping[str, Sequence[Found]]


def fill(page: str, beside: Path, runs: Runs) -> str:
    """The page with all marked tables and numbers as the runs, and files beside the page, have them."""
    tables = {
        table.name: table for task, found in runs.items() for table in all_tables(task, found)
    }

    def table(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise UserError(f"there is no table {match[2]}; there are {', '.join(tables)}.")
        return f"{match[1]}\n{markdown(tables[match[2]])}\n{match[3]}"

    def number(match: re.Match[str]) -> str:
        value = value_of(match[3], beside, runs) * (100 if match[2] else 1)
        if not math.isfinite(value):
            raise UserError(f"{match[3]!r} is not a number: {value}.")
        digits = len(match[1].partition(".")[2])
        text = f"{value:{',' if ',' in match[1] or digits == 0 else ''}.{digits}f}"
        return f"{text.replace('-', '−')}{match[2] or ''}<!-- {match[3]} -->"

    return NUMBER.sub(number, TABLE.sub(table, page))


def value_of(source: str, beside: Path, runs: Runs) -> float:
    """What the comment behind a number says."""
    if match := FILE.fullmatch(source):
        content = read_json(beside / match[1])
        try:
            for name in match[2].split("."):
                content = content[int(name) if isinstance(content, list) else name]
            return float(content)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{match[1]} holds no number {match[2]}.") from None
    match = QUANTITY.fullmatch(source)
    if not match or match[2] not in LOWER_IS_BETTER or match[3] not in runs:
        raise UserError(
            f"a number cannot be computed: {source!r} names neither a quantity nor a file."
        )
    paper, quantity, task, one, other, seed = match.groups()
    methods = [one, other] if other else [one]
    if paper:
        numbers = [printed(task, method, quantity) for method in methods]
        if None in numbers:
            raise UserError(f"the paper prints no {quantity} of {' and '.join(methods)} on {task}.")
        means = [x for x in numbers if x is not None]
    else:
        values = [values_of(runs[task], method, quantity) for method in methods]
        common = set.intersection(*({*v} for v in values)) & ({int(seed)} if seed else {*values[0]})
        if not common:
            raise UserError(f"{source!r}: there is no such result.")
        means = [float(np.mean([v[s] for s in common])) for v in values]
    return means[0] / means[1] if other else means[0]


def loose_numbers(page: str) -> list[str]:
    """Numbers that nothing computes, with what stands before them."""
    text = NUMBER.sub("", TABLE.sub("", page))
    text = NAMES.sub("", re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL))
    return [
        json.dumps(m[0])[1:-1] for m in re.finditer(r".{0,20}(?<![\w.])(?<!\w-)\d[\d.,]*", text)
    ]
