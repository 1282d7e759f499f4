"""Pictures of what the bench measured, over batch; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jspec.core.tree import Tree
from jspec.tools.bench import throughput
from jspec.tools.bench.compare import Best, Row, best
from jspec.tools.bench.rounds import Timing
from jspec.tools.plot import DRAFT, FONT_SIZE, TARGET, matplotlib_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # told apart by all eyes
MARKERS = ("o", "s", "^", "D", "v")  # the next for each turn of the colours
THIN: dict[str, Any] = {"linestyle": ":", "linewidth": 0.9, "marker": "_", "markersize": 5}
GRID = "#EEEEEE"
BATCH, MILLISECONDS, TOKENS = "batch (rows)", "ms a round", "tokens/s"
PANEL = 4.6, 3.4  # inches
MARGIN = 0.9  # for title and legend
DPI = 150
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """A value by batch, and the least it could be where that is known."""

    label: str
    points: Mapping[int, float]
    floors: Mapping[int, float] = field(default_factory=dict)


def check_path(path: Path) -> None:
    """Refuse what no picture can be written to, before anything is measured.

    Raises:
        ValueError: the ending is of no kind of picture, or the folder does not exist.
        ImportError: matplotlib is not installed.
    """
    kinds = sorted(matplotlib_module("figure").Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"picture: expected a file that ends in one of {', '.join(kinds)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"picture: expected an existing folder, got {path.parent}; make it first")


def save(figure: Figure, path: Path) -> None:
    """Write a picture; the ending of the path says which kind."""
    figure.savefig(path, dpi=DPI)


def over_batch(ax: Axes, lines: Sequence[Line], ylabel: str) -> None:
    """Draw lines, floors thin, over batches spaced by their logarithm; the value axis starts at 0."""
    for number, line in enumerate(lines):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
        ax.plot(*_sorted(line.points), color=colour, marker=marker, markersize=5, label=line.label)
        ax.plot(*_sorted(line.floors), color=colour, **THIN)
    if any(line.floors for line in lines):
        ax.plot([], [], color="black", label="floor of each", **THIN)
    batches = sorted({batch for line in lines for batch in line.points})
    ax.set_xscale("log", base=2)
    ax.set(xlabel=BATCH, ylabel=ylabel, xlim=(batches[0] / 1.3, batches[-1] * 1.3), ylim=(0, None))
    ax.set_xticks(batches, labels=[str(batch) for batch in batches])
    ax.minorticks_off()
    ax.grid(axis="y", color=GRID)


def _sorted(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return sorted(points), [points[batch] for batch in sorted(points)]


def step(results: Sequence[Timing]) -> Figure:
    """Time of a round by tree with floors, a panel for each context and page size."""
    trees = list(dict.fromkeys(result.case.tree for result in results))
    panels = _grouped(results, lambda result: (result.case.context, result.case.page_size, result.case.idle))
    figure, axes = _panels(1, len(panels))
    for ax, ((context, page, idle), own) in zip(axes[0], panels.items(), strict=True):
        by_tree = _grouped(own, lambda result: result.case.tree)
        lines = [
            Line(
                tree_name(tree),
                {result.case.batch: result.milliseconds for result in by_tree[tree]},
                {result.case.batch: result.floor for result in by_tree[tree]},
            )
            for tree in trees
        ]
        over_batch(ax, lines, MILLISECONDS)
        ax.set_title(f"context {context}, page size {page}" + (f", {idle} rows idle" if idle else ""), size=10)
    figure.suptitle(f"{_models(result.case for result in results)}, nothing accepted", size=11)
    return _with_legend(figure, axes)


def tokens(results: Sequence[throughput.Throughput]) -> Figure:
    """Tokens a second by tree at synthetic acceptance, which the picture says."""
    figure, axes = _panels(1, 1)
    lines = []
    for own in _grouped(results, lambda result: result.case.point.tree).values():
        label = f"{tree_name(own[0].case.point.tree)}, stated length {own[0].stated_length:.2f}"
        lines.append(Line(label, {result.case.point.batch: result.tokens_per_second for result in own}))
    over_batch(axes[0][0], lines, TOKENS)
    first = results[0].case
    axes[0][0].set_title(f"context {first.point.context} to {first.point.context + first.tokens}", size=10)
    figure.suptitle(f"{_models(result.case.point for result in results)}\nSYNTHETIC acceptance", size=11)
    return _with_legend(figure, axes)


def compare(rows: Sequence[Row], title: str) -> Figure:
    """Two panels for each quantization and context: times of all drafts, and tokens a second of the best ones."""
    places = _grouped(rows, lambda row: row.point.place[:2])
    figure, axes = _panels(len(places), 2, widths=(2, 1))
    for (left, right), ((quant, context), own) in zip(axes, places.items(), strict=True):
        by_batch = _grouped(own, lambda row: row.point.batch)
        _pairs(left, {batch: [_time(row) for row in group] for batch, group in by_batch.items()}, MILLISECONDS)
        _pairs(right, {one.batch: [_tokens(one)] for one in best(own)}, TOKENS)
        where = f"context {context}" + (f", {quant}" if quant else "")
        left.set_title(f"one round by k; {where}", size=10)
        right.set_title(f"best k at the stated acceptance; {where}", size=10)
    figure.suptitle(title, size=10)
    return _with_legend(figure, axes)


class Pair(NamedTuple):
    """Both sides' values with what each is of; None where a side has none."""

    rival: tuple[str, float] | None
    ours: tuple[str, float] | None
    floor: float | None = None


def _time(row: Row) -> Pair:
    label = row.point.draft if row.point.k is None else str(row.point.k)
    sides = [None if value is None else (label, value) for value in (row.rival, row.ours)]
    return Pair(sides[0], sides[1], row.floor)


def _tokens(one: Best) -> Pair:
    sides = [None if side is None else (str(side[0]), side[1]) for side in (one.rival, one.ours)]
    return Pair(sides[0], sides[1])


def _pairs(ax: Axes, groups: Mapping[int, Sequence[Pair]], ylabel: str) -> None:
    """Two bars side by side for each pair, group by group; labels above the bars, our floor across our bar."""
    middles, first = [], 0.0
    for pairs in groups.values():
        for place, pair in enumerate(pairs):
            for offset, colour, name, side in ((0, TARGET, "rival", pair.rival), (1, DRAFT, "ours", pair.ours)):
                if side is not None:
                    bar = ax.bar(first + 2.4 * place + offset, side[1], 1, color=colour, label=name)
                    ax.bar_label(bar, [side[0]], fontsize=FONT_SIZE, padding=2, rotation=90 if len(side[0]) > 2 else 0)
            if pair.floor is not None:
                at = first + 2.4 * place + 1
                ax.plot([at - 0.5, at + 0.5], [pair.floor] * 2, color="black", linewidth=1.2, label="floor of ours")
        middles.append(first + 1.2 * len(pairs) - 0.7)
        first += 2.4 * len(pairs) + 1.6
    ax.set(xlabel=BATCH, ylabel=ylabel)
    ax.set_xticks(middles, labels=[str(batch) for batch in groups])
    ax.tick_params(axis="x", length=0)
    ax.margins(x=0.02, y=0.2 if any(_is_long(pair) for pairs in groups.values() for pair in pairs) else 0.1)
    ax.grid(axis="y", color=GRID)
    ax.set_axisbelow(True)


def _is_long(pair: Pair) -> bool:
    return any(side is not None and len(side[0]) > 2 for side in (pair.rival, pair.ours))


def tree_name(tree: Tree | None) -> str:
    """A tree as a label: long static ones by their size."""
    is_long = tree is not None and tree.paths is not None and not tree.is_chain
    return f"static, {tree.nodes} nodes" if is_long and tree else str(tree).lower()


def _models(cases: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(f"{case.shape} {case.dtype}{'' if case.greedy else ' sampled'}" for case in cases))


def _grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _panels(rows: int, columns: int, widths: Sequence[float] | None = None) -> tuple[Figure, Any]:
    """A figure and its axes, a list of rows.

    Args:
        widths: of the columns, in panels; then each has a scale of its own. None: one panel each, on one scale.
    """
    width, height = PANEL[0] * sum(widths or [1] * columns), PANEL[1] * rows
    figure = matplotlib_module("figure").Figure(figsize=(width, height + MARGIN), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, width_ratios=widths, sharey=widths is None)


def _with_legend(figure: Figure, axes: Any) -> Figure:
    """One legend below all panels, each label once."""
    by_label: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    entry = 0.7 + 0.085 * max(map(len, by_label))  # inches
    columns = max(1, min(len(by_label), int(figure.get_figwidth() / entry)))
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return figure
