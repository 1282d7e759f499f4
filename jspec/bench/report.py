"""What the bench prints: a text table and, on request, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jspec.bench.rounds import Timing
from jspec.report import table


def environment() -> dict[str, str]:
    """What a figure depends on besides the case."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "jspec": _own_version(),
    }


def _own_version() -> str:
    try:
        return version("jspec")
    except PackageNotFoundError:
        return "not installed"


def timings(results: Sequence[Timing]) -> str:
    """One line a case: median, spread, floor and their ratio."""
    rows = [
        [
            "shape",
            "dtype",
            "page",
            "batch",
            "context",
            "tree",
            "ms",
            "p90-p10",
            "floor",
            "ratio",
            "tokens",
            "compile s",
        ]
    ]
    for result in results:
        case = result.case
        rows.append(
            [
                case.shape,
                case.dtype,
                str(case.page_size),
                str(case.batch),
                str(case.context),
                str(case.tree).lower(),
                f"{result.milliseconds:.3f}",
                f"{result.spread:.3f}",
                f"{result.floor:.3f}",
                f"{result.milliseconds / result.floor:.2f}",
                f"{result.tokens:.2f}",
                f"{result.compile_seconds:.1f}",
            ]
        )
    return table(rows)


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
