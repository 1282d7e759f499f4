"""`jspec bench`: its commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from jspec.tools.bench.options import OPTIONS, Option

COMMANDS = {  # help of each command
    "step": "time of a decoding step beside its floor",
    "acceptance": "how much is accepted",
    "report": "drafted beside plain decoding of real prompts: a table and a picture to show",
    "serve": "latencies, throughput and acceptance of an engine",
    "inflate": "a small model in a larger shape that computes the same",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands of `jspec bench` on a parser."""
    commands: Any = parser.add_subparsers(dest="bench", required=True)
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, declare=partial(declare, OPTIONS[name]))


def declare(options: Sequence[Option], parser: argparse.ArgumentParser) -> None:
    """Declare the options of a subcommand on its parser."""
    for flags, settings in options:
        parser.add_argument(*flags, **settings)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand, whose module is imported first; return the exit status."""
    from jspec.tools.bench.results import measure

    name = arguments.bench
    module = import_module(f"jspec.tools.bench.{'inflate.convert' if name == 'inflate' else name}")
    return measure(module.run(arguments), arguments.out / "report.json" if name == "report" else arguments.json)
