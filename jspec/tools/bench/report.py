"""Base of the bench commands: parser, table, JSON file and picture from declared options and columns."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jspec import __version__
from jspec.core.tree import TREE_FORMS, Tree
from jspec.tools.bench import roofline
from jspec.tools.plot import matplotlib_module
from jspec.tools.table import table

Option = tuple[tuple[str, ...], dict[str, Any]]  # arguments of `argparse.ArgumentParser.add_argument`


class Column(NamedTuple):
    """A table column: one attribute of every result, which the JSON file holds under the same name."""

    path: str  # attribute of a result, with dots for an attribute of an attribute
    heading: str  # text above the column, with the unit
    format: str | Callable[[Any], str] = ""  # format specification (None gives an empty cell) or a function

    def cell(self, result: Any) -> str:
        value = attrgetter(self.path)(result)
        if not isinstance(self.format, str):
            return self.format(value)
        return "" if value is None else format(value, self.format)


def columns(format: str = "", **headings: str) -> list[Column]:
    """Return columns with one format from attribute names and headings; ``a__b`` names attribute b of a."""
    return [Column(name.replace("__", "."), heading, format) for name, heading in headings.items()]


class Mark(NamedTuple):
    """One point of the picture, drawn at its batch size on a labelled line of a panel."""

    panel: str  # title of the panel
    label: str  # label of the line in the legend
    batch: int  # rows of the batch, the x axis
    value: float  # measured value, the y axis
    floor: float | None = None  # least possible value, drawn dotted


@dataclass(frozen=True)
class Report:
    """Results of a command: the JSON file holds all their fields, the printed table the given columns."""

    headline: str  # printed before the table, followed by the environment
    columns: Sequence[Column]
    results: Iterable[Any]  # records; a generator measures one after the other
    text: str | Callable[[Sequence[Any]], str] = ""  # text printed after the table, or a function of the results
    about: Mapping[str, Any] = field(default_factory=dict)  # further members of the JSON object
    marks: Callable[[Any], Sequence[Mark]] = lambda result: ()  # marks of a result in the picture
    code: int = 0  # exit code


@dataclass(frozen=True)
class Command:
    """A subcommand of `jspec bench`, called with the parsed command line."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], Report]
    options: Sequence[Option]  # command-line options besides --json

    def add_to(self, commands: Any) -> None:
        """Declare the subcommand and its options on a parser's subcommands."""
        parser = commands.add_parser(self.name, help=self.help)
        for flags, settings in (*self.options, file_option("--json", "also write the results there")):
            parser.add_argument(*flags, **settings)
        parser.set_defaults(run=self)

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Measure, print the table, write the JSON file and picture; return the exit code.

        Each result goes to the JSON file, and its row to the standard error, as soon as it is measured.
        """
        image = getattr(arguments, "picture", None)
        if image is not None:
            check_picture_path(image)
        report, results = self.run(arguments), list[Any]()

        def write() -> None:
            content = {"environment": environment(), **plain(report.about), "results": plain(results)}
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(content, indent=1))

        for result in report.results:
            results.append(result)
            if isinstance(report.results, Iterator):
                cells = [cell for one in report.columns if (cell := one.cell(result))]
                print(*cells, end="\n" if cells else "", file=sys.stderr, flush=True)
                write()
        write()
        text = report.text if isinstance(report.text, str) else report.text(results)
        parts = (f"{report.headline}; {environment()}", table_of(report.columns, results), text)
        print("\n".join(part for part in parts if part))
        if image is not None:
            draw([mark for result in results for mark in report.marks(result)], report.headline).savefig(image, dpi=150)
        return report.code


def scaled(factor: float, spec: str) -> Callable[[float | None], str]:
    """Return a column format that multiplies a value by ``factor``; None gives an empty cell."""
    return lambda value: "" if value is None else format(value * factor, spec)


def option(*flags: str, **settings: Any) -> Option:
    return flags, settings


def file_option(flag: str, text: str) -> Option:
    return option(flag, type=Path, metavar="FILE", help=text)


def ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def int_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def tree_or_none(text: str) -> Tree | None:
    return None if text == "none" else Tree.parse(text)


def tree_name(tree: Tree | None) -> str:
    """Return a draft tree as the text that `Tree.parse` reads, or "none"."""
    return str(tree).lower()


def tree_label(tree: Tree | None) -> str:
    """Return a draft tree's short name for tables and pictures: a long static tree by its size."""
    is_long = tree is not None and tree.paths is not None and not tree.is_chain
    return f"static, {tree.nodes} nodes" if is_long and tree else tree_name(tree)


TREES = partial(option, "--tree", type=tree_or_none, nargs="+", metavar="TREE", help=f"none, {TREE_FORMS}")
PICTURE = file_option("--picture", "also draw the results there, over the batch; needs matplotlib")


def environment() -> dict[str, str]:
    """Return the device, versions and other facts of the environment that every result depends on."""
    device = jax.devices()[0]
    names = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__, "jspec": __version__}
    return names | {"floors": str(roofline.chip())}


def table_of(columns: Sequence[Column], results: Iterable[Any]) -> str:
    """Format a table with a line for each result; columns without a value are left out."""
    rows = [[column.cell(result) for column in columns] for result in results]
    shown = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return table([[columns[i].heading for i in shown], *([row[i] for i in shown] for row in rows)]) if shown else ""


def plain(value: Any) -> Any:
    """Convert a value for JSON: records to objects, trees and infinity to text, nan to null."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: tree_name(one) if name == "tree" else plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, (Tree, Path)) else value


def check_picture_path(path: Path) -> None:
    """Raise an error, before anything is measured, if no picture can be written to a path."""
    kinds = sorted(matplotlib_module("figure").Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"picture: expected a file that ends in one of {', '.join(kinds)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"picture: expected an existing folder, got {path.parent}; make it first")


def draw(marks: Sequence[Mark], title: str) -> Any:
    """Draw marks over batch size in panels side by side, with one legend below and dotted floors; return the figure."""
    panels = list(dict.fromkeys(mark.panel for mark in marks))
    labels = list(dict.fromkeys(mark.label for mark in marks))
    batches = sorted({mark.batch for mark in marks})
    figure = matplotlib_module("figure").Figure(figsize=(4.6 * len(panels), 4.3), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (index, panel), (number, label) in ((p, n) for p in enumerate(panels) for n in enumerate(labels)):
        own = sorted((m.batch, m.value, m.floor) for m in marks if (m.panel, m.label) == (panel, label))
        style = {"color": f"C{number % 10}", "marker": "os^Dv"[number // 10 % 5]}
        axes[index].plot([m[0] for m in own], [m[1] for m in own], label=label, **style)
        floors = [m[2] if m[2] is not None else math.nan for m in own]
        axes[index].plot([m[0] for m in own], floors, color=style["color"], linestyle=":", linewidth=0.9)
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_xscale("log", base=2)
        ax.set(title=panel, xlabel="batch (rows)", ylim=(0, None))
        ax.set_xticks(batches, labels=[str(batch) for batch in batches])
    figure.suptitle(title, size=10, wrap=True)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=max(1, 2 * len(panels)))
    return figure
