"""The files of `jspec bench report`: report.json, report.md, which is a table to paste, and the picture report.svg."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.tools import report_figure
from jspec.tools.bench.results import cells, plain
from jspec.tools.plot import matplotlib_module
from jspec.tools.table import table

JSON, MARKDOWN, PICTURE = "report.json", "report.md", "report.svg"
KEY = ("prompts", "temperature", "batch")  # of a row; options that a row has one value of
COMPARED = ("length", "plain_rate", "drafted_rate", "speed_up")  # with an earlier report, as report.json names them
DIFFERENT = """THE TOKENS OF DRAFTED DECODING DIFFER FROM THOSE OF PLAIN DECODING. Two programs may round a near tie in
different ways: repeat with --deterministic or --dtype float32; if they differ then too, please report it.
"""
EXPLANATION = """Tokens a round: mean acceptance length, with its standard error over prompts. First token ms and ms a
token: time to the first token and of each token after it, median (P99) over requests, plain → drafted."""


def check(out: Path, against: Path | None) -> None:
    """Raise an error if the report could not be written or compared, before anything is measured."""
    matplotlib_module("figure")
    if (out / JSON).exists():
        raise ValueError(f"--out: expected a folder without a report, got {out / JSON}; name another or remove it")
    if against is not None and not (against / JSON).is_file():
        raise ValueError(f"--against: expected a folder with {JSON}, got {against}; name that of an earlier report")
    out.mkdir(parents=True, exist_ok=True)


def read(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Read an earlier report; raise a ValueError that says how its load differs if it is another."""
    earlier = json.loads((folder / JSON).read_text(encoding="utf-8"))
    load = plain(facts["load"])
    if others := _differences(earlier.get("load", {}), load):
        raise ValueError(f"--against: expected a report of the same load, got {folder} with {'; '.join(others)}")
    count = math.prod(len(set(load[name])) for name in KEY)
    if len(earlier["results"]) < count:
        raise ValueError(
            f"--against: expected {count} rows in {folder}, got {len(earlier['results'])}; measure it again"
        )
    return earlier


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name)} instead of {new.get(name)}" for name in names]


def write(folder: Path, rows: Sequence[Any], facts: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> str:
    """Write the table and the picture; return the text that is printed after the table."""
    warning = DIFFERENT if any(row.differs for row in rows) else ""
    text = warning + ("" if earlier is None else changes(rows, plain(facts), earlier))
    (folder / MARKDOWN).write_text(markdown(rows, facts, text), encoding="utf-8")
    report_figure.draw(rows, folder / PICTURE)
    return f"{text}written: {', '.join(str(folder / name) for name in (JSON, MARKDOWN, PICTURE))}"


def markdown(rows: Sequence[Any], facts: Mapping[str, Any], text: str) -> str:
    """Return the table, what was measured with which command, and a text."""
    machine, load, drafting = facts["machine"], facts["load"], facts["drafting"]
    limit = "" if machine["power_limit"] is None else f", power limit {machine['power_limit']:.0f} W"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("jspec", "jax", "python"))
    prompts = ", ".join(f"{count} {name}" for name, (count, _) in load["prompts"].items())
    lines = [[*cells(rows[0])], ["---:"] * len(cells(rows[0])), *([*cells(row).values()] for row in rows)]
    parts = [
        f"Target {load['target']}; drafter {drafting['draft']}, {drafting['tree']}; accept rule {drafting['accept']}; "
        f"answers of at most {load['tokens']} tokens to {prompts} prompts; times served: {facts['repeats']}.",
        f"Device {machine['device']} ({machine['platform']}, {machine['cores']} processor cores{limit}); {versions}; "
        f"{facts['date']}.\n",
        *("| " + " | ".join(line) + " |" for line in lines),
        f"\n{EXPLANATION}\n",
        f"![speed-up by batch size, acceptance by position]({PICTURE})\n",
        f"`{facts['command']}`\n",
        *([f"```text\n{text}```\n"] if text else []),
    ]
    return "\n".join(parts)


def changes(rows: Sequence[Any], facts: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return a table of what changed since an earlier report of the same load, and what was different then."""
    old = {tuple(row[name] for name in KEY): row for row in earlier["results"]}
    lines = [[*KEY, *COMPARED, "ratio of drafted_rate"]]
    for row in rows:
        before = old[key := tuple(getattr(row, name) for name in KEY)]
        values = [f"{before[name]:.4g} → {getattr(row, name):.4g}" for name in COMPARED]
        lines.append([*map(str, key), *values, f"{row.drafted_rate / before['drafted_rate']:.2f}"])
    others = [one for name in ("drafting", "machine") for one in _differences(earlier[name], facts[name])]
    return f"earlier report → this one; the earlier one: {'; '.join([earlier['date'], *others])}\n{table(lines)}\n"
