"""Tables, JSON files and pictures of the bench commands."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jspec import Tree
from jspec.tools.bench import report
from jspec.tools.bench.report import Column, Command, Mark, Report

matplotlib = pytest.importorskip("matplotlib")

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Inner:
    tree: Tree | None
    context: float


@dataclass(frozen=True)
class Result:
    inner: Inner
    share: float | None


RESULTS = [Result(Inner(None, math.inf), 0.25), Result(Inner(Tree.chain(2), 8), math.nan)]
COLUMNS = (Column("inner.tree", "tree", report.tree_name), Column("share", "share", ".0%"))


def test_report_table_column_without_values_is_left_out() -> None:
    columns = [*COLUMNS, Column("share", "never", lambda value: "")]
    lines = report.table_of(columns, [*RESULTS, Result(RESULTS[0].inner, None)]).splitlines()
    assert [line.split() for line in lines if "-" not in line] == [
        ["tree", "share"],
        ["none", "25%"],
        ["chain:2", "nan%"],
        ["none"],
    ]
    assert report.table_of(columns[2:], RESULTS) == ""


def test_report_records_are_converted_to_json_values() -> None:
    expected = [
        {"inner": {"tree": "none", "context": "inf"}, "share": 0.25},
        {"inner": {"tree": "chain:2", "context": 8}, "share": None},
    ]
    assert json.loads(json.dumps(report.plain(RESULTS))) == expected
    assert report.plain({"file": Path("a"), "mark": Mark("a", "b", 1, 2.0), "ks": (1, 2)}) == {
        "file": "a",
        "mark": {"panel": "a", "label": "b", "batch": 1, "value": 2.0, "floor": None},
        "ks": [1, 2],
    }


def test_report_command_prints_table_writes_json_and_draws_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Results that are measured one by one are printed and written one by one."""
    paths, seen = (tmp_path / "out.json", tmp_path / "out.svg"), []

    def run(arguments: argparse.Namespace) -> Report:
        def measured() -> Iterator[Result]:
            yield RESULTS[0]
            seen.append((capsys.readouterr(), json.loads(paths[0].read_text())["results"]))
            yield from RESULTS[1 : arguments.count]

        marks = [Mark("one panel", "a line", 1, 3.0)]
        return Report("what", COLUMNS, measured(), "after", {"seed": 3}, lambda result: marks, code=1)

    parser = argparse.ArgumentParser()
    options = [report.option("--count", type=int), report.PICTURE]
    Command("measure", "help", run, options).add_to(parser.add_subparsers())
    words = ["measure", "--count", "2", "--json", str(paths[0]), "--picture", str(paths[1])]
    arguments = parser.parse_args(words)
    assert arguments.run(arguments) == 1
    assert seen == [(("", "none 25%\n"), report.plain(RESULTS[:1]))]
    printed, written = capsys.readouterr().out.splitlines(), json.loads(paths[0].read_text())
    assert printed[0].startswith("what; {'device'") and printed[-1] == "after" and len(printed) == 6
    assert written == {"environment": report.environment(), "seed": 3, "results": report.plain(RESULTS)}
    assert "<svg" in paths[1].read_text()


@pytest.mark.parametrize(
    ("name", "message"), [("out.txt", "a file that ends in"), ("nowhere/out.png", "an existing folder")]
)
def test_report_picture_path_not_writable_raises_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.check_picture_path(Path(name))


def test_report_picture_has_a_line_and_dotted_least_value_for_each_label() -> None:
    batches, trees = (1, 8, 64), [f"chain:{length}" for length in range(1, 13)]
    marks = [
        Mark(f"context {context}", tree, batch, 10.0 * batch + index, 5.0 * batch)
        for context in (128, 1024)
        for (index, tree), batch in itertools.product(enumerate(trees), reversed(batches))
    ]
    figure = report.draw(marks, "a title")
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == trees
    assert [ax.get_title() for ax in figure.axes] == ["context 128", "context 1024"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() and figure.axes[0].get_ylim()[0] == 0
    check_inside(figure)
    for ax in figure.axes:
        assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "8", "64"]
        for index, (line, floor) in enumerate(zip(ax.lines[::2], ax.lines[1::2], strict=True)):
            assert line.get_xdata().tolist() == list(batches) and line.get_ydata().tolist() == [
                10.0 * b + index for b in batches
            ]
            assert floor.get_ydata().tolist() == [5.0 * batch for batch in batches]
            assert floor.get_linewidth() < line.get_linewidth() and floor.get_color() == line.get_color()
        assert len({(line.get_color(), line.get_marker()) for line in ax.lines[::2]}) == len(trees)


def check_inside(figure: Any) -> None:
    """Assert that titles, legend and labels lie inside the figure."""
    (legend,) = figure.legends
    texts = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    for box in [legend.get_window_extent(), *(text.get_window_extent() for text in texts if text.get_text())]:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
