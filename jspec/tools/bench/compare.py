"""Another engine's step times beside ours, from two files, and tokens a second of both at a stated acceptance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jspec.core.tree import Tree
from jspec.tools.bench.report import Column, Mark, Report

RIVAL_LINE = "an object with mode, quant, k, batch, inlen and step_ms"
ONE_OF_EACH = ("shape", "dtype", "page_size", "implementation", "greedy", "quantize", "draft_quantize", "kv_dtype")
SETTINGS = (*ONE_OF_EACH, "idle", "depth")  # settings that all our results must share
QUANT = {"fp8_dynamic": "fp8", "fp8": "fp8 weights"}  # other engines' "fp8" quantises weights and activations


class Point(NamedTuple):
    """What was timed."""

    quant: str  # "": none
    context: int
    batch: int
    mode: str  # "none" or the drafter, as "eagle3"
    draft: str  # tree as `Tree.parse` reads it, or "none"

    @property
    def k(self) -> int | None:
        """Length of the chain, 0 without a draft; None for another tree."""
        kind, _, size = self.draft.partition(":")
        return 0 if self.draft == "none" else int(size) if kind == "chain" else None


@dataclass
class Row:
    """A point that at least one side has; None where a side lacks it, or no acceptance of its draft is stated."""

    point: Point
    rival: float | None  # milliseconds of a step
    ours: float | None  # milliseconds of a step
    floor: float | None  # floor of our step, milliseconds
    rival_tokens: float | None  # tokens a second of the whole batch
    our_tokens: float | None
    ratio: float | None  # our time over the rival's: below 1 ours is faster
    best: str = ""  # sides with the most tokens a second here, at this quantisation, context and batch
    gain: float | None = None  # our best tokens a second over the rival's best: above 1 ours is faster


COLUMNS = (
    Column("point.quant", "quant", lambda quant: quant or "none"),
    Column("point.context", "context"),
    Column("point.batch", "batch"),
    Column("point.mode", "mode"),
    Column("point.draft", "draft"),
    Column("rival", "rival ms", ".3f"),
    Column("ours", "our ms", ".3f"),
    Column("floor", "floor", ".3f"),
    Column("ratio", "ours/rival", ".2f"),
    Column("rival_tokens", "rival tok/s", ".0f"),
    Column("our_tokens", "our tok/s", ".0f"),
    Column("best", "best of"),
    Column("gain", "best/best", ".2f"),
)


def read_rival(path: Path) -> dict[Point, float]:
    """Milliseconds of a step by point, from lines of JSON with mode, quant, k, batch, inlen and step_ms.

    Raises:
        ValueError: naming a line with a wrong field or a repeated point; or there is no line.
    """
    found: dict[Point, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
                mode, quant, k = record["mode"], record["quant"], record["k"]
                if type(k) is not int or not isinstance(quant, str) or (mode == "none") != (k == 0):
                    raise ValueError(f"mode {mode!r}, quant {quant!r} and k {k!r}; k is 0 with mode none alone")
                draft = str(Tree.chain(k)) if k else "none"
                _put(found, Point(quant, record["inlen"], record["batch"], mode, draft), record["step_ms"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: expected {RIVAL_LINE}, got {error!r}") from None
    if not found:
        raise ValueError(f"{path}: expected a line of JSON for each point, got none")
    return found


def read_ours(path: Path) -> tuple[dict[str, Any], dict[Point, tuple[float, float]]]:
    """Environment with settings, and milliseconds and floor by point, of a file that `bench step --json` wrote.

    Raises:
        ValueError: another kind of file, a repeated point, or results of several settings.
    """
    found: dict[Point, tuple[float, float]] = {}
    settings = set()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for result in content["results"]:
            case, quant = result["case"], result["case"].get("quantize") or ""
            mode = "none" if case["tree"] == "none" else "eagle3"
            point = Point(QUANT.get(quant, quant), case["context"], case["batch"], mode, case["tree"])
            _put(found, point, result["milliseconds"], result["floor"])
            settings.add(tuple(case.get(name) for name in SETTINGS))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected results as `jspec bench step --json` writes them, got {error!r}") from None
    if len(settings) != 1:
        raise ValueError(f"{path}: expected results of one {', '.join(SETTINGS)}, got {sorted(map(str, settings))}")
    return content.get("environment", {}) | dict(zip(SETTINGS, settings.pop(), strict=True)), found


def _put(found: dict[Point, Any], point: Point, *times: Any) -> None:
    numbers = (point.context, point.batch, *times)
    if not all(type(one) in (int, float) and 0 < one < math.inf for one in numbers):
        raise ValueError(f"context, batch and times {numbers}, which must be above 0")
    if point in found:
        raise ValueError(f"the point {tuple(point)} twice")
    found[point] = times if len(times) > 1 else float(times[0])


def rows(rival: Mapping[Point, float], ours: Mapping[Point, tuple[float, float]], rates: Sequence[float]) -> list[Row]:
    """Every point of either side, by quantisation, context and batch, short drafts first."""

    def order(point: Point) -> tuple[Any, ...]:
        return *point[:3], point.k is None, point.k or 0, point.mode, point.draft

    found = []
    for point in sorted({*rival, *ours}, key=order):
        length = 1 + sum(rates[: point.k]) if point.k is not None and point.k <= len(rates) else None
        theirs, (own, floor) = rival.get(point), ours.get(point, (None, None))
        tokens = [point.batch * length / ms * 1e3 if ms and length else None for ms in (theirs, own)]
        ratio = own / theirs if own and theirs else None
        found.append(Row(point, theirs, own, floor, tokens[0], tokens[1], ratio))
    for place in {row.point[:3] for row in found}:
        own_rows = [row for row in found if row.point[:3] == place]
        best = [max(own_rows, key=lambda row: getattr(row, side) or 0) for side in ("rival_tokens", "our_tokens")]
        if best[0].rival_tokens:
            best[0].best = "rival"
        if best[1].our_tokens:
            best[1].best = f"{best[1].best}, ours".removeprefix(", ")
            best[1].gain = best[1].our_tokens / best[0].rival_tokens if best[0].rival_tokens else None
    return found


def run(rival: Path, ours: Path | None, rates: Sequence[float]) -> Report:
    """Compare two files.

    Raises:
        ValueError: no file of ours, or a file that cannot be read.
    """
    if ours is None:
        raise ValueError("throughput: expected --ours with --rival, a file of `jspec bench step --json`; give both")
    own, times = read_ours(ours)
    found = rows(read_rival(rival), times, rates)
    marks = []
    for row in found:
        panel, batch = f"context {row.point.context} {row.point.quant}", row.point.batch
        marks += [Mark(panel, f"rival, {row.point.draft}", batch, row.rival)] if row.rival else []
        marks += [Mark(panel, f"ours, {row.point.draft}", batch, row.ours, row.floor)] if row.ours else []
    text = f"tokens/s from STATED shares of steps that accept each position of a chain, {', '.join(map(str, rates))}"
    about = {"rival": rival, "ours": own, "stated_rates": rates}
    return Report(f"ms a step, rival: {rival}; ours: {own}", COLUMNS, found, text, about, marks)
