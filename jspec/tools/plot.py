"""Draws figures of rounds, draft trees and acceptance, with matplotlib.

All figures have two colours that colour-blind readers can tell apart: blue for draft tokens, orange for the target's
own tokens.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jspec.train.journal import read_journal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jspec.engine.request.metrics import Metrics
    from jspec.engine.request.request import Completion
    from jspec.engine.request.round_record import Round
    from jspec.engine.text.tokenizer import Tokenizer

DRAFT, TARGET, FAINT = "#0072B2", "#D55E00", "#BBBBBB"
FONT, FONT_SIZE = "DejaVu Sans Mono", 8.0  # font that comes with matplotlib; size in points
CHARACTER = 0.61 * FONT_SIZE / 72  # width of a character in inches
LONGEST = 10  # maximum number of characters of a token's text
ROW = 0.27  # distance of the tree's rows in inches
LEGEND = 6.5  # width of a legend in one line, in inches
VISIBLE = str.maketrans({" ": "·", "\n": "↵", "\t": "→", "\r": "↵"})


def rounds(completion: Completion, ax: Axes | None = None) -> Axes:
    """Draw the number of tokens of each round, split into accepted draft tokens and the target's own token.

    A line marks the mean acceptance length.

    Args:
        completion: generated with ``trace=True``.
        ax: axes to draw on; None: a new figure.

    Raises:
        ValueError: the completion has no rounds.
    """
    if completion.rounds is None:
        raise ValueError("expected a completion with rounds, got one without: pass trace=True to generate")
    accepted = [min(r.accept_len, len(r.emitted)) for r in completion.rounds]
    target_tokens = [len(r.emitted) - count for r, count in zip(completion.rounds, accepted, strict=True)]
    ax = ax or _new_axes(width=min(max(LEGEND, 0.12 * len(accepted)), 16.0), height=3.0)
    numbers = range(1, len(accepted) + 1)
    ax.bar(numbers, accepted, color=DRAFT, label="accepted draft tokens")
    ax.bar(numbers, target_tokens, bottom=accepted, color=TARGET, label="target's own token")
    mean = completion.metrics.mean_acceptance_length
    ax.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"mean acceptance length {mean:.2f}")
    ax.set(xlabel="round", ylabel="tokens")
    ax.locator_params(integer=True)
    _legend_above(ax)
    return ax


def acceptance(metrics: Metrics, ax: Axes | None = None) -> Axes:
    """Draw the share of rounds that accepted the draft token at each position, counted from 1."""
    shares = metrics.acceptance_per_position
    ax = ax or _new_axes(width=max(4.0, 0.5 * len(shares)), height=3.0)
    bars = ax.bar(range(1, len(shares) + 1), shares, color=DRAFT)
    ax.bar_label(bars, labels=[f"{share:.2f}" for share in shares], fontsize=FONT_SIZE)
    mean = f"mean acceptance length {metrics.mean_acceptance_length:.2f}"
    ax.set(xlabel="draft position", xticks=range(1, len(shares) + 1))
    ax.set(ylabel="share of rounds accepting it", ylim=(0, 1.1))
    ax.set_title(f"{metrics.num_drafts} rounds, {mean}" if shares else "no draft token was accepted", size=10)
    return ax


def methods(metrics: Mapping[str, Metrics], ax: Axes | None = None) -> Axes:
    """Draw the mean acceptance length of several drafters as bars of the target's own token and accepted draft tokens.

    Args:
        metrics: metrics of each drafter, by the drafter's name.
        ax: axes to draw on; None: a new figure.
    """
    ax = ax or _new_axes(width=LEGEND, height=0.7 + 0.4 * len(metrics))
    accepted = [drafter_metrics.mean_acceptance_length - 1 for drafter_metrics in metrics.values()]
    ax.barh(list(metrics), 1, color=TARGET, label="the target's own token")
    bars = ax.barh(list(metrics), accepted, left=1, color=DRAFT, label="accepted draft tokens")
    ax.bar_label(bars, labels=[f"{1 + mean:.2f}" for mean in accepted], padding=3, fontsize=FONT_SIZE)
    ax.set(xlabel="mean acceptance length (tokens a round)", xlim=(0, 1.1 * (1 + max(accepted))))
    ax.invert_yaxis()
    _legend_above(ax)
    return ax


def training(journal: str | Path, ax: Axes | None = None) -> Axes:
    """Draw the loss and the predicted acceptance length of a training run by the number of updates.

    Lines are measured on the rows that were trained on; marks are evaluations of held-out rows.

    Args:
        journal: file of the run, ``training/journal.jsonl`` in the folder of the head.
        ax: axes to draw on; None: a new figure.
    """
    entries = read_journal(Path(journal))
    ax = ax or _new_axes(width=LEGEND, height=3.5)
    other = ax.twinx()
    for axes, name, colour in ((ax, "loss", TARGET), (other, "acceptance", DRAFT)):
        for kind, style in (("train", "-"), ("eval", "o")):
            points = [(entry["step"], entry[name]) for entry in entries if entry["kind"] == kind]
            label = f"{name}, {'held-out rows' if kind == 'eval' else 'training'}"
            ax.plot([], [], style, color=colour, label=label)  # the legend of both axes
            axes.plot(*zip(*points, strict=True), style, color=colour) if points else None
    ax.set(xlabel="updates", ylabel="loss of a prediction")
    other.set(ylabel="predicted acceptance length", ylim=(1, max(2, other.get_ylim()[1])))  # noise is no success
    _legend_above(ax)
    return ax


def calibration(rounds: Sequence[Round], ax: Axes | None = None, *, bins: int = 10) -> Axes:
    """Draw a calibration curve: the acceptance rate of draft tokens against their draft probability.

    On the diagonal, tokens are accepted as often as their draft probability says. Each point is labelled with its
    number of tokens.

    Args:
        rounds: rounds of completions that were generated with ``trace=True``.
        ax: axes to draw on; None: a new figure.
        bins: number of bins of draft probability, all of equal width.
    """
    points = _calibration(rounds, bins)
    ax = ax or _new_axes(width=5.0, height=4.0)
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1, label="accepted as often as predicted")
    ax.plot([p.predicted for p in points], [p.accepted for p in points], color=DRAFT, marker="o", label="measured")
    for point in points:
        below = point.accepted > 0.5  # keeps the label inside the axes
        ax.annotate(
            str(point.tokens),
            (point.predicted, point.accepted),
            xytext=(0, -6 if below else 6),
            textcoords="offset points",
            fontsize=FONT_SIZE,
            ha="center",
            va="top" if below else "bottom",
            bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
        )
    ax.set(xlabel="probability in the draft", xlim=(-0.03, 1.03), ylabel="share accepted", ylim=(-0.05, 1.05))
    _legend_above(ax)
    return ax


class _Bin(NamedTuple):
    """One bin of the calibration curve: draft tokens of similar draft probability."""

    predicted: float  # mean draft probability
    accepted: float  # share of tokens accepted
    tokens: int  # number of tokens


def _calibration(rounds: Sequence[Round], bins: int) -> list[_Bin]:
    """Make the non-empty bins of the calibration curve.

    Only children of accepted nodes are counted, because other nodes are rejected with their parents.

    Args:
        rounds: rounds with their trees.
        bins: number of bins.
    """
    pairs = [
        (float(np.exp(r.scores[node] - r.scores[r.parents[node]])), node in r.path)
        for r in rounds
        for node in np.flatnonzero(np.isin(r.parents, r.path))
    ]
    held: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for predicted, accepted in pairs:
        held[min(int(predicted * bins), bins - 1)].append((predicted, accepted))
    means = [(np.mean(members, axis=0), len(members)) for members in held if members]
    return [_Bin(float(predicted), float(accepted), tokens) for (predicted, accepted), tokens in means]


def tree(round: Round, tokenizer: Tokenizer | None = None, ax: Axes | None = None) -> Axes:
    """Draw one round's tree with the text and the score of each node; each depth is a column.

    Accepted nodes are filled. The root and the token after the accepted path are the target's own and are orange.

    Args:
        round: an element of ``completion.rounds``.
        tokenizer: tokenizer that decodes the labels; None: labels are token ids.
        ax: axes to draw on, with a smaller font if the axes are small; None: a new figure that is large enough.
    """
    nodes = _place(_nodes(round, tokenizer))
    column = CHARACTER * max(len(node.label) for node in nodes) + 0.45  # inches
    width = column * (1 + max(node.depth for node in nodes))
    height = ROW * (1 + max(node.row for node in nodes))
    scale = 1.0
    if ax is None:
        ax = _new_axes(max(width + 0.3, LEGEND), height + 1.1)
    else:
        given_width, given_height = _inches(ax)
        scale = min(1.0, given_width / width, given_height / height)
    _draw(ax, nodes, FONT_SIZE * scale)
    return ax


@dataclass
class _Node:
    """A node of the drawn tree."""

    label: str  # text in the node
    parent: int  # index of the parent; -1: the root
    accepted: bool = False  # whether the node is a draft token that was accepted
    is_target: bool = False  # whether the target chose the token: the root, and the token after the accepted path
    depth: int = 0  # column
    row: float = 0.0  # vertical position in rows from the top


def _nodes(round: Round, tokenizer: Tokenizer | None) -> list[_Node]:
    """List the nodes to draw: the root, the draft nodes without padding, and the target's last token, if any."""
    drafted = np.flatnonzero(round.parents >= 0).tolist()
    place = {node: index for index, node in enumerate([0, *drafted])}  # padding may be between the nodes
    path = {int(node) for node in round.path}
    nodes = [_Node(_token_text(int(round.tokens[0]), tokenizer), -1, is_target=True)]
    for i in drafted:
        label = f"{_token_text(int(round.tokens[i]), tokenizer)} {round.scores[i]:.2f}"
        nodes.append(_Node(label, place[int(round.parents[i])], accepted=i in path))
    if len(round.emitted) > round.accept_len:
        text = _token_text(round.emitted[round.accept_len], tokenizer)
        nodes.append(_Node(text, place[int(round.path[-1])], is_target=True))
    return nodes


def _place(nodes: list[_Node]) -> list[_Node]:
    """Set the depth and row of each node and return the nodes.

    Each leaf has a row of its own, in sibling order; a parent is centred on its children.
    """
    children: list[list[_Node]] = [[] for _ in nodes]
    for node in nodes[1:]:
        children[node.parent].append(node)
        node.depth = nodes[node.parent].depth + 1
    below = {id(node): kin for node, kin in zip(nodes, children, strict=True)}
    leaves = itertools.count()

    def place(node: _Node) -> float:
        rows = [place(child) for child in below[id(node)]]
        node.row = (rows[0] + rows[-1]) / 2 if rows else float(next(leaves))
        return node.row

    place(nodes[0])
    return nodes


def _draw(ax: Axes, nodes: Sequence[_Node], font_size: float) -> None:
    for node in nodes:
        colour = TARGET if node.is_target else DRAFT
        if node.parent >= 0:
            parent = nodes[node.parent]
            style: dict[str, Any] = {"color": FAINT, "linewidth": 0.8, "zorder": 1}
            if node.accepted or node.is_target:
                style = {"color": colour, "linewidth": 2.0, "zorder": 2}
            bend = node.depth - 0.5
            columns, rows = (
                [parent.depth, bend, bend, node.depth],
                [parent.row, parent.row, node.row, node.row],
            )
            ax.plot(columns, rows, **style)
        filled = node.accepted or node.is_target
        ax.text(
            node.depth,
            node.row,
            node.label,
            color="white" if filled else "black",
            bbox=dict(boxstyle="round,pad=0.2", facecolor=colour if filled else "white", edgecolor=colour),
            family=FONT,
            fontsize=font_size,
            ha="center",
            va="center",
            zorder=3,
            parse_math=False,
        )
    for label, face, edge in (
        ("accepted", DRAFT, DRAFT),
        ("drafted, not accepted", "white", DRAFT),
        ("the target's own", TARGET, TARGET),
    ):
        ax.scatter([], [], marker="s", color=face, edgecolor=edge, label=label)
    ax.set_xlim(-0.5, max(node.depth for node in nodes) + 0.5)
    ax.set_ylim(max(node.row for node in nodes) + 0.6, -0.6)
    ax.set(yticks=[], xticks=range(1 + max(node.depth for node in nodes)), xlabel="depth (tokens after the root)")
    ax.tick_params(length=0)
    ax.set_frame_on(False)
    _legend_above(ax)


def _token_text(token: int, tokenizer: Tokenizer | None) -> str:
    """Return a token's label: its shortened text with visible spaces, or its id if the font lacks a character."""
    text = "" if tokenizer is None else tokenizer.decode([token]).translate(VISIBLE)
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    glyphs = _font_manager().get_font(_font_manager().findfont(FONT))
    drawable = "\ufffd" not in text and all(glyphs.get_char_index(ord(character)) for character in text)
    return text if text and drawable else f"#{token}"


def _new_axes(width: float, height: float) -> Axes:
    """Make the axes of a new figure of the given size in inches."""
    _, ax = _pyplot().subplots(figsize=(width, height), layout="constrained")
    return ax


def _legend_above(ax: Axes) -> None:
    columns = 3 if _inches(ax)[0] > 0.7 * LEGEND else 1
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=columns, frameon=False, fontsize=FONT_SIZE)


def _inches(ax: Axes) -> tuple[float, float]:
    """Return the current width and height of axes in inches."""
    figure: Any = ax.get_figure(root=True)
    extent = ax.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    return extent.width, extent.height


def _pyplot() -> Any:
    return matplotlib_module("pyplot")


def _font_manager() -> Any:
    return matplotlib_module("font_manager")


def matplotlib_module(module: str) -> Any:
    """Import a module of matplotlib, which is an optional dependency.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            'jspec.plot needs matplotlib: pip install -e ".[notebooks]" in the folder of jspec'
        ) from error
