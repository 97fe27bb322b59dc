"""Pages whose numbers are computed: the page of results, whose numbers all come from files beside it."""

import json
from pathlib import Path

import pytest

import cli
from envs import TASKS
from machinery.files import UserError
from machinery.gather import Found
from machinery.quotes import fill, loose_numbers
from machinery.tables import all_tables, csv, latex, markdown

from test_report import compared  # isort: skip

RESULTS = Path(__file__).parents[1] / "results"
PAGES = sorted(RESULTS.rglob("README.md"))


@pytest.fixture(scope="module", params=PAGES, ids=lambda page: page.parent.name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def results(page: Path) -> dict[str, list[Found]]:
    """Of the tasks beside a page."""
    return cli.found_runs([page.parent / task for task in TASKS if (page.parent / task).exists()])


def test_every_number_of_the_results_is_computed_from_the_files_beside_it(
    page: Path, results: dict[str, list[Found]]
) -> None:
    text = page.read_text()
    assert loose_numbers(text) == []
    assert fill(text, page.parent, results) == text, (
        f"qdt report with --fill {page} brings it up to date"
    )


def test_the_readmes_table_is_computed_from_the_results() -> None:
    page = RESULTS.parent / "README.md"
    runs = cli.found_runs([RESULTS / task for task in TASKS if (RESULTS / task).exists()])
    assert fill(page.read_text(), page.parent, runs) == page.read_text()
    assert "<!-- distance on ant-omni: QDT(ME-LS) -->" in page.read_text()


def test_the_tables_of_the_results_are_those_of_their_runs(
    page: Path, results: dict[str, list[Found]]
) -> None:
    for task, runs in results.items():
        for table in all_tables(task, runs):
            path = page.parent / task / "report" / table.name
            for suffix, write in ((".md", markdown), (".csv", csv), (".tex", latex)):
                assert path.with_suffix(suffix).read_text() == write(table), path


PAGE = """See table 1, figures 5 and 14, seeds 0 to 2, `train.width=128` and [there](x-1.md).
Distance 9.99<!-- distance on ant-omni: QDT(ME) / ME -->
(the paper: 9.99<!-- paper distance on ant-omni: QDT(ME) / ME -->),
of one seed 9<!-- distance on ant-omni: ME, seed 1 -->,
found in 7,000<!-- x/a.json: result.episodes --> episodes,
99.9 %<!-- x/a.json: result.shares.1 --> of them; change −1.0<!-- x/a.json: change -->.

<!-- table accuracy-ant-omni -->
what stood here
<!-- end -->
"""


def test_marked_tables_and_numbers_are_filled_in(tmp_path: Path) -> None:
    content = {"result": {"episodes": 12345.0, "shares": [0, 0.125]}, "change": -0.26}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.json").write_text(json.dumps(content))
    runs = {"ant-omni": compared([2.0, 4.0], [1.0, 3.0])}
    filled = fill(PAGE, tmp_path, runs)
    assert "Distance 0.67<!--" in filled and "(the paper: 0.73<!--" in filled
    assert "of one seed 4<!--" in filled and "in 12,345<!--" in filled
    assert "12.5 %<!--" in filled and "change −0.3<!--" in filled
    assert "what stood here" not in filled and "| QDT(ME) | 2 | 2.0 ± 1.4" in filled
    assert fill(filled, tmp_path, runs) == filled
    assert loose_numbers(filled) == []


@pytest.mark.parametrize(
    "text", ["it is 0.5 of that", "| ME | 3 |", "0.5<!--x--> so", "12 % of them", "by -3"]
)
def test_a_number_without_a_source_is_found(text: str) -> None:
    assert len(loose_numbers(f"As in table 1, {text}.")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "<!-- distance on mars: ME -->",
        "<!-- beauty on ant-omni: ME -->",
        "<!-- distance on ant-omni: PGAME -->",
        "<!-- paper distance on ant-omni: ME-Mine -->",
        "<!-- nothing.json: result -->",
        "<!-- some.json: nothing -->",
        "<!-- some.json: result.1 -->",
        "<!-- some.json: result.0.deeper -->",
        "<!-- some.json: result -->",
        "<!-- some.json: nan -->",
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps({"result": [0.5], "nan": float("nan")}))
    with pytest.raises(UserError):
        fill(f"1.0{source}", tmp_path, {"ant-omni": compared([2.0], [1.0])})
    with pytest.raises(UserError, match="there is no table"):
        fill("<!-- table x -->\n<!-- end -->", tmp_path, {})
