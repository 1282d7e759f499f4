"""What the bench prints: a text table and, on request, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jspec.tools.bench import floors
from jspec.tools.bench.rounds import Timing
from jspec.tools.table import table


def environment() -> dict[str, str]:
    """What a figure depends on besides the case."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "jspec": _own_version(),
        "floors": str(floors.chip()),
    }


def _own_version() -> str:
    try:
        return version("jspec")
    except PackageNotFoundError:
        return "not installed"


def timings(results: Sequence[Timing]) -> str:
    """One line a case: median, spread, floor and their ratio; of a GPU also its clock and power."""
    clock: dict[str, Callable[[Timing], str]] = {
        "SM MHz": lambda r: str(r.clock) if r.clock else "",
        "W": lambda r: f"{r.clock.watts:.0f}" if r.clock else "",
        "capped": lambda r: f"{r.clock.capped:.0%}" if r.clock else "",
    }
    columns: dict[str, Callable[[Timing], str]] = {
        "shape": lambda r: r.case.shape,
        "dtype": lambda r: r.case.dtype,
        "weights": lambda r: r.case.weights,
        "cache": lambda r: r.case.kv_dtype or r.case.dtype,
        "page": lambda r: str(r.case.page_size),
        "batch": lambda r: str(r.case.batch),
        "idle": lambda r: str(r.case.idle),
        "context": lambda r: str(r.case.context),
        "tree": lambda r: str(r.case.tree).lower(),
        "depth": lambda r: str(r.case.drafted.depth if r.case.drafted else 0),
        "ms": lambda r: f"{r.milliseconds:.3f}",
        "p90-p10": lambda r: f"{r.spread:.3f}",
        "floor": lambda r: f"{r.floor:.3f}",
        "ratio": lambda r: f"{r.milliseconds / r.floor:.2f}",
        **(clock if any(result.clock for result in results) else {}),
        "tokens": lambda r: f"{r.tokens:.2f}",
        "compile s": lambda r: f"{r.compile_seconds:.1f}",
    }
    return table([list(columns), *([cell(result) for cell in columns.values()] for result in results)])


def fields(result: Timing) -> dict[str, Any]:
    """A result as it is written; the tree as `Tree.parse` reads it."""
    own = asdict(result)
    return own | {"case": own["case"] | {"tree": str(result.case.tree).lower()}}


def write_json(path: Path, results: Sequence[Timing]) -> None:
    """Environment and results as one JSON object."""
    write(path, [fields(result) for result in results])


def write(path: Path, results: Sequence[dict[str, Any]], **about: Any) -> None:
    """Environment, what else is to be said, and results as one JSON object."""
    path.write_text(json.dumps({"environment": environment(), **about, "results": results}, indent=1))
