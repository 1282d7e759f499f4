"""A rival's rounds beside ours, point by point, and what they come to in tokens a second at a stated acceptance."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jspec.core.tree import Tree
from jspec.tools.bench.synthetic import Rates, mean_length
from jspec.tools.table import table

TEXT, COUNT, SIZE, TIME = "a text", "a whole number", "a whole number above 0", "a number above 0"
KINDS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    COUNT: lambda value: type(value) is int and value >= 0,
    SIZE: lambda value: type(value) is int and value > 0,
    TIME: lambda value: type(value) in (int, float) and 0 < value < math.inf,
}
RIVAL_FIELDS = {"mode": TEXT, "quant": TEXT, "k": COUNT, "batch": SIZE, "inlen": SIZE, "step_ms": TIME}
SETTINGS = (
    "shape",
    "dtype",
    "page_size",
    "implementation",
    "greedy",
    "quantize",
    "draft_quantize",
    "kv_dtype",
    "idle",
    "depth",
)  # one of each in what is compared
NOTHING = "-"


class Point(NamedTuple):
    """What was timed. ``draft`` is a tree as `Tree.parse` reads it, or "none"; ``quant`` is "" for none."""

    quant: str
    context: int
    batch: int
    mode: str
    draft: str

    @property
    def k(self) -> int | None:
        """Length of the chain, 0 for none; None for another tree."""
        kind, _, size = self.draft.partition(":")
        return 0 if self.draft == "none" else int(size) if kind == "chain" else None

    @property
    def measurable(self) -> bool:
        """Whether `jspec.tools.bench.rounds` can time it: a chain of an EAGLE-3 head or none, weights as they are."""
        return not self.quant and self.mode in ("none", "eagle3")

    @property
    def place(self) -> tuple[str, int, int]:
        """Where drafts compete."""
        return self.quant, self.context, self.batch


class Own(NamedTuple):
    """Our round and its floor, milliseconds."""

    milliseconds: float
    floor: float


@dataclass(frozen=True)
class Row:
    """A point that at least one side has; milliseconds, tokens a second where the acceptance of its draft is stated."""

    point: Point
    rival: float | None
    ours: float | None
    floor: float | None
    rival_tokens: float | None
    our_tokens: float | None

    @property
    def ratio(self) -> float | None:
        """Our time over the rival's: below 1 ours is faster."""
        return self.ours / self.rival if self.ours and self.rival else None

    @property
    def note(self) -> str:
        return "only rival" if self.ours is None else "only ours" if self.rival is None else ""


@dataclass(frozen=True)
class Best:
    """The drafts that yield most at one place, of those each side has; None where it has none.

    Attributes:
        rival: its chain length and tokens a second.
        ours: likewise.
        rival_tried: the lengths that it is the best of.
        ours_tried: likewise.
    """

    quant: str
    context: int
    batch: int
    rival: tuple[int, float] | None
    ours: tuple[int, float] | None
    rival_tried: tuple[int, ...]
    ours_tried: tuple[int, ...]

    @property
    def gain(self) -> float | None:
        """Our tokens a second over the rival's: above 1 ours is faster."""
        return self.ours[1] / self.rival[1] if self.ours and self.rival else None


def read_rival(path: Path) -> dict[Point, float]:
    """Milliseconds a round by point, from lines of JSON with the fields of `RIVAL_FIELDS`; others are not read.

    Raises:
        ValueError: a line that is not understood or repeats a point, or no line at all.
    """
    found: dict[Point, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            point, milliseconds = _rival_line(line)
            _put(found, point, milliseconds)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: expected a line of JSON for each point, got none")
    return found


def _rival_line(line: str) -> tuple[Point, float]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got {line[:40]!r} ({error.msg})") from None
    for name, kind in RIVAL_FIELDS.items():
        _field(fields, name, kind)
    if (fields["mode"] == "none") != (fields["k"] == 0):
        raise ValueError(f'expected k 0 with mode "none" and only there, got {fields["mode"]!r} and {fields["k"]}')
    draft = str(Tree.chain(fields["k"])) if fields["k"] else "none"
    point = Point(fields["quant"], fields["inlen"], fields["batch"], fields["mode"], draft)
    return point, float(fields["step_ms"])


def _field(fields: Any, name: str, kind: str) -> Any:
    """A field of one of `KINDS`."""
    value = fields.get(name) if isinstance(fields, dict) else None
    if not KINDS[kind](value):
        raise ValueError(f"expected an object with {name}, {kind}, got {value!r}")
    return value


def _put(found: dict[Point, Any], point: Point, value: Any) -> None:
    if point in found:
        raise ValueError(f"expected each point once, got {tuple(point)} again")
    found[point] = value


def own_points(results: Sequence[Any], source: str) -> dict[Point, Own]:
    """Our rounds by point, from results as `jspec bench step --json` writes them.

    Args:
        source: of the results, for messages.

    Raises:
        ValueError: a result that is not understood or repeats a point, none at all, or results of several settings.
    """
    found: dict[Point, Own] = {}
    settings = set()
    for number, result in enumerate(results, 1):
        try:
            case = _case(result)
            settings.add(tuple(case.get(name) for name in SETTINGS))
            mode = "none" if case["tree"] == "none" else "eagle3"
            point = Point(_quant(case), case["context"], case["batch"], mode, case["tree"])
            _put(found, point, Own(_field(result, "milliseconds", TIME), _field(result, "floor", TIME)))
        except ValueError as error:
            raise ValueError(f"{source}, result {number}: {error}") from None
    if len(settings) != 1:
        got = ", ".join(sorted(map(str, settings))) or "no result"
        raise ValueError(f"{source}: expected results of one {', '.join(SETTINGS)}, got {got}")
    return found


def _quant(case: Mapping[str, Any]) -> str:
    """As rivals say it: "fp8" rounds weights and inputs."""
    kind = case.get("quantize") or ""
    return {"fp8_dynamic": "fp8", "fp8": "fp8 weights"}.get(kind, kind)


def _case(result: Any) -> dict[str, Any]:
    case: dict[str, Any] = result.get("case", {}) if isinstance(result, dict) else {}
    if _field(case, "tree", TEXT) != "none":
        Tree.parse(case["tree"])
    for name in ("context", "batch"):
        _field(case, name, SIZE)
    return case


def read_own(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Environment and results of a file that `jspec bench step --json` wrote.

    Raises:
        ValueError: it is another file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: expected JSON ({error.msg})") from None
    if not isinstance(content, dict) or not isinstance(content.get("results"), list):
        raise ValueError(f"{path}: expected environment and results, as `jspec bench step --json` writes them")
    return content.get("environment", {}), content["results"]


def rows(rival: Mapping[Point, float], ours: Mapping[Point, Own], rates: Rates) -> list[Row]:
    """Every point of either side, by quantization, context and batch, short drafts first."""

    def order(point: Point) -> tuple[Any, ...]:
        return *point.place, point.k is None, point.k or 0, point.mode, point.draft

    found = []
    for point in sorted({*rival, *ours}, key=order):
        own, length = ours.get(point), _length(point, rates)
        theirs, mine = rival.get(point), own and own.milliseconds
        tokens = [point.batch * length / ms * 1e3 if ms and length else None for ms in (theirs, mine)]
        found.append(Row(point, theirs, mine, own and own.floor, tokens[0], tokens[1]))
    return found


def _length(point: Point, rates: Rates) -> float | None:
    """Mean acceptance length; None where the rates do not say."""
    return mean_length(rates[: point.k]) if point.k is not None and point.k <= len(rates) else None


def best(found: Sequence[Row]) -> list[Best]:
    """The best draft of either side at each place, plain decoding among them."""
    return [_best(place, list(group)) for place, group in itertools.groupby(found, lambda row: row.point.place)]


def _best(place: tuple[str, int, int], group: Sequence[Row]) -> Best:
    def tried(tokens: Callable[[Row], float | None]) -> dict[int, float]:
        return {row.point.k: value for row in group if row.point.k is not None and (value := tokens(row))}

    rival, ours = tried(lambda row: row.rival_tokens), tried(lambda row: row.our_tokens)
    winners = [max(side.items(), key=lambda item: item[1]) if side else None for side in (rival, ours)]
    return Best(*place, rival=winners[0], ours=winners[1], rival_tried=tuple(rival), ours_tried=tuple(ours))


def text(found: Sequence[Row], rates: Rates) -> str:
    """Every point, then the best draft at each place, then the drafts that the rates say nothing of."""
    heading = ["quant", "context", "batch", "mode", "k", "rival ms", "our ms", "floor", "ours/rival"]
    points = [[*heading, "rival tok/s", "our tok/s", ""]]
    for row in found:
        p = row.point
        times = [_number(value, 3) for value in (row.rival, row.ours, row.floor)]
        tokens = [_number(value, 0) for value in (row.rival_tokens, row.our_tokens)]
        k = p.draft if p.k is None else str(p.k)
        place = [p.quant or "none", str(p.context), str(p.batch), p.mode, k]
        points.append([*place, *times, _number(row.ratio, 2), *tokens, row.note])
    lengths = ", ".join(f"{mean_length(rates[:k]):.2f}" for k in range(1, len(rates) + 1))
    stated = (
        f"tokens/s from STATED mean acceptance lengths, {lengths} for k = 1 to {len(rates)}; the best k of each side:"
    )
    silent = sorted({row.point.draft for row in found if _length(row.point, rates) is None})
    ending = [f"no acceptance stated, so no tokens/s: {', '.join(silent)}"] if silent else []
    return "\n".join([table(points), "", stated, table(_best_rows(best(found))), *ending])


def _best_rows(found: Sequence[Best]) -> list[list[str]]:
    lines = [["quant", "context", "batch", "rival k", "of", "tok/s", "our k", "of", "tok/s", "ours/rival"]]
    for one in found:
        cells = [one.quant or "none", str(one.context), str(one.batch)]
        for winner, tried in ((one.rival, one.rival_tried), (one.ours, one.ours_tried)):
            k, tokens = winner or (None, None)
            cells += [_number(k, 0), ",".join(map(str, tried)) or NOTHING, _number(tokens, 0)]
        lines.append([*cells, _number(one.gain, 2)])
    return lines


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def write_json(path: Path, found: Sequence[Row], rates: Rates, about: Mapping[str, Any]) -> None:
    """What is compared, the stated rates, points and best drafts as one JSON object."""
    points = [row.point._asdict() | asdict(row) | {"ratio": row.ratio} for row in found]
    for point in points:
        del point["point"]
    winners = [asdict(one) | {"gain": one.gain} for one in best(found)]
    path.write_text(json.dumps({**about, "stated_rates": rates, "points": points, "best": winners}, indent=1))
