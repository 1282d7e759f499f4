"""Base of the bench commands: table and JSON file from declared columns.

A measured value is declared once, as a field of a record with a `Column` in its annotation. The field's name is its
JSON name; the column's heading has the unit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import jax

from jspec import __version__
from jspec.core.tree import Tree
from jspec.tools.bench import roofline
from jspec.tools.bench.options import tree_name
from jspec.tools.table import table


class Column(NamedTuple):
    """The heading and format of a table column, written into the annotation of a record's field."""

    heading: str
    format: str | Callable[[Any], str] = ""  # format specification (None gives an empty cell) or a function

    def cell(self, value: Any) -> str:
        if callable(self.format):
            return self.format(value)
        return "" if value is None else format(value, self.format)


def cells(record: Any) -> dict[str, str]:
    """Return a record's table cells by heading; records in its fields add their own cells."""
    texts: dict[str, str] = {}
    for name, hint in get_type_hints(type(record), include_extras=True).items() if is_dataclass(record) else ():
        value = getattr(record, name)
        column = next((argument for argument in get_args(hint) if isinstance(argument, Column)), None)
        if column is None:
            texts |= cells(value)
        else:
            texts[column.heading] = column.cell(value)
    return texts


@dataclass(frozen=True)
class Results:
    """The results of a command; the JSON file holds all their fields, the printed table those with a column."""

    headline: str  # printed before the table, followed by the environment
    results: Iterable[Any]  # records; a generator measures one after the other
    text: str | Callable[[Sequence[Any]], str] = ""  # text printed after the table, or a function of the results
    about: Mapping[str, Any] = field(default_factory=dict)  # further members of the JSON object
    count: int | None = None  # number of the results, if it is known beforehand
    failed: Callable[[Sequence[Any]], bool] = lambda results: False  # whether the results show a fault


def measure(report: Results, file: Path | None) -> int:
    """Measure, print the table, write the JSON file if there is one; return the exit status, 1 if the results failed.

    What is measured one after the other goes to the JSON file and to the standard error at once: first the headline,
    then with the first row the columns' headings, and before each row its number.
    """
    results = list[Any]()

    def write() -> None:
        content = {"environment": environment(), **plain(report.about), "results": plain(results)}
        if file is not None:
            file.write_text(json.dumps(content, indent=1))

    is_slow, total = isinstance(report.results, Iterator), "" if report.count is None else f" of {report.count}"
    if is_slow:
        print(report.headline, file=sys.stderr, flush=True)
    for number, result in enumerate(report.results, 1):
        results.append(result)
        if is_slow:
            row = {heading: text for heading, text in cells(result).items() if text}
            lines = [["row", *row]] * (number == 1) + [[f"{number}{total}", *row.values()]]
            print(*map("  ".join, lines if row else ()), sep="\n", end="\n" if row else "", file=sys.stderr, flush=True)
            write()
    write()
    text = report.text if isinstance(report.text, str) else report.text(results)
    parts = (f"{report.headline}; {environment_text()}", table_of(results), text)
    print("\n".join(part for part in parts if part))
    return int(report.failed(results))


def environment() -> dict[str, str | None]:
    """Return what every result depends on: the device, the versions, and the rates of the floors if known."""
    device, chip = jax.devices()[0], roofline.chip()
    names = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "jspec": __version__}
    return names | {"floors": None if chip is None else str(chip)}


def environment_text() -> str:
    """Return the environment as one line of text."""
    env = environment()
    floors = env["floors"] or "none, as the memory bandwidth of this device is unknown"
    return f"device: {env['device']} ({env['platform']}), jax {env['jax']}, jspec {env['jspec']}; floors: {floors}"


def table_of(results: Iterable[Any]) -> str:
    """Format a table with a line for each result; leave out columns without a value."""
    rows = [cells(result) for result in results]
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    headings = [heading for heading in headings if any(row.get(heading) for row in rows)]
    return table([headings, *([row.get(heading, "") for heading in headings] for row in rows)]) if headings else ""


def plain(value: Any) -> Any:
    """Convert a value for JSON: records to objects, trees and infinity to text, nan to null."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: tree_name(item) if name == "tree" else plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, (Tree, Path)) else value
