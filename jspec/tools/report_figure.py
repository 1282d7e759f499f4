"""Draws the picture of `jspec bench report` with matplotlib: speed-up by batch size, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec.tools.plot import matplotlib_module

SIZE = (6.25, 3.4)  # of the picture in inches: 600 pixels wide
GREY, COLOURS, DASHES = "#808080", ("#2B83BA", "#D55E00", "#009E73", "#CC79A7"), ("-", "--", ":", "-.")
STYLE = {"svg.hashsalt": "jspec", "font.size": 9, "legend.frameon": False}  # readable on white and on black
STYLE |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), GREY)
GROUPS = ("prompts", "temperature", "batch")  # colours, dashes and positions of the lines


def draw(rows: Sequence[Any], file: Path) -> None:
    """Draw the speed-up by batch size, and the acceptance by position at the largest batch size."""
    prompts, temperatures, batches = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in GROUPS)
    with matplotlib_module("pyplot").rc_context(STYLE):
        figure = matplotlib_module("figure").Figure(figsize=SIZE, layout="constrained")
        left, right = figure.subplots(1, 2)
        for group in dict.fromkeys((row.prompts, row.temperature) for row in rows):
            line = [row for row in rows if (row.prompts, row.temperature) == group]
            colour = COLOURS[prompts.index(group[0]) % len(COLOURS)]
            style: dict[str, Any] = dict(marker="o", markersize=4, color=colour)
            style |= dict(linestyle=DASHES[temperatures.index(group[1]) % len(DASHES)])
            left.plot([batches.index(row.batch) for row in line], [row.speed_up for row in line], **style)
            shares = line[-1].figures[1]["acceptance_per_position"]
            label = f"{group[0]}, temperature {group[1]:g}"
            right.plot(range(1, len(shares) + 1), shares, label=label, **style)
        left.axhline(1, color=GREY, linewidth=0.8)
        left.set(xlabel="batch size", ylabel="speed-up over plain decoding", ylim=(0, None))
        left.set_xticks(range(len(batches)), map(str, batches))
        right.set(xlabel="position of the draft token", ylabel="share of rounds accepting it", ylim=(0, 1))
        right.set_xticks(range(1, 1 + len(shares)))
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=3)
        figure.savefig(file, transparent=True, metadata={"Date": None, "Creator": None})
