"""`jspec bench throughput --rival`: another engine's step times beside ours, and tokens a second at stated rates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jspec.core.tree import Tree
from jspec.tools.bench.report import Column, Report

RIVAL_LINE = "an object with mode, quant, k, batch, inlen and step_ms"
OUR_FILE = "what `jspec bench step --json` writes, each point once, all else of the cases equal"
VARIED = ("batch", "context", "tree", "quantize")
QUANT = {"fp8_dynamic": "fp8", "fp8": "fp8 weights"}  # other engines' "fp8" quantises weights and activations


class Row(NamedTuple):
    """A point that at least one side has: milliseconds of a step, and tokens a second of the whole batch."""

    quant: str  # "none", or the kind
    context: int
    batch: int
    draft: str  # as `Tree.parse` reads it, or "none"
    rival: float | None
    ours: float | None
    floor: float | None
    ratio: float | None  # our time over the rival's: below 1 ours is faster
    rival_tokens: float | None  # None without a step, or without stated rates for the draft
    our_tokens: float | None


HEADINGS = (
    "quant",
    "context",
    "batch",
    "draft",
    "rival ms",
    "our ms",
    "floor",
    "ours/rival",
    "rival tok/s",
    "our tok/s",
)
FORMATS = ("",) * 4 + (".3f",) * 3 + (".2f", ".0f", ".0f")
COLUMNS = tuple(Column(*of) for of in zip(Row._fields, HEADINGS, FORMATS, strict=True))


def _rival_times(path: Path) -> Iterator[tuple[Any, ...]]:
    for line in filter(str.strip, path.read_text(encoding="utf-8").splitlines()):
        one = json.loads(line)
        if (one["mode"] == "none") != (one["k"] == 0):
            raise ValueError(f"k {one['k']} with mode {one['mode']}")
        draft = str(Tree.chain(one["k"])) if one["k"] else "none"
        yield one["quant"] or "none", one["inlen"], one["batch"], draft, one["step_ms"]


def _our_times(path: Path) -> Iterator[tuple[Any, ...]]:
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    for one in results:
        case, first = ({k: v for k, v in r["case"].items() if k not in VARIED} for r in (one, results[0]))
        if case != first:
            raise ValueError(f"{first} and {case}")
        context, batch, tree, quant = (one["case"][name] for name in ("context", "batch", "tree", "quantize"))
        yield QUANT.get(quant, quant or "none"), context, batch, tree, one["milliseconds"], one["floor"]


def read(path: Path, *, is_rival: bool) -> dict[tuple[Any, ...], tuple[float, ...]]:
    """Milliseconds by point: the rival's step, or our step and its floor; any mistake in the file is a ValueError."""
    found: dict[tuple[Any, ...], tuple[float, ...]] = {}
    try:
        for line in _rival_times(path) if is_rival else _our_times(path):
            point, times = line[:4], line[4:]
            if point in found or not all(0 < one < math.inf for one in (*point[1:3], *times)):
                raise ValueError(f"{line}, twice or not above 0")
            found[point] = times
        if not found:
            raise ValueError("no point")
    except (ValueError, TypeError, KeyError) as error:
        expected = f"lines, each {RIVAL_LINE}" if is_rival else OUR_FILE
        raise ValueError(f"{path}: expected {expected}, got {error!r}") from None
    return found


def length(draft: str, rates: Sequence[float]) -> float | None:
    """Tokens a step of a chain, by the share of steps that accept each position; None: no rates for this draft."""
    tree = None if draft == "none" else Tree.parse(draft)
    depth = 0 if tree is None else tree.depth
    return 1 + math.fsum(rates[:depth]) if (tree is None or tree.is_chain) and depth <= len(rates) else None


def run(rival: Path, ours: Path | None, rates: Sequence[float]) -> Report:
    """Compare two files."""
    if ours is None:
        raise ValueError("throughput: expected --ours with --rival, a file of `jspec bench step --json`; give both")
    theirs, own = read(rival, is_rival=True), read(ours, is_rival=False)
    found, best = [], dict[tuple[Any, ...], list[float]]()
    for point in sorted(theirs.keys() | own.keys()):
        (rival_ms,), (our_ms, floor) = theirs.get(point, (None,)), own.get(point, (None, None))
        tokens = length(point[3], rates)
        speeds = [point[2] * tokens / ms * 1e3 if ms and tokens else None for ms in (rival_ms, our_ms)]
        ratio = our_ms / rival_ms if rival_ms and our_ms else None
        found.append(Row._make([*point, rival_ms, our_ms, floor, ratio, *speeds]))
        most = best.setdefault(point[:3], [0.0, 0.0])
        most[:] = [max(one, speed or 0.0) for one, speed in zip(most, speeds, strict=True)]
    gains = [
        f"best draft, {', '.join(map(str, at))}: {b / a:.2f} times the rival's" for at, (a, b) in best.items() if a
    ]
    text = f"tokens/s from STATED shares of steps that accept each position of a chain, {', '.join(map(str, rates))}"
    about = {"rival": rival, "ours": ours, "stated_rates": rates}
    return Report(f"ms a step, rival: {rival}; ours: {ours}", COLUMNS, found, "\n".join([*gains, text]), about)
