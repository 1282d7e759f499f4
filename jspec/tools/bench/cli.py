"""`jspec bench`: its six commands."""

from __future__ import annotations

import argparse
from typing import Any

from jspec.tools.bench import acceptance, kernels, pair, serve, startup, step, throughput
from jspec.tools.bench.inflate import convert as inflate
from jspec.tools.bench.report import Command, option

STEP = {"step": step.run, "startup": startup.run}
MEASURE = option("--measure", choices=list(STEP), default="step", help="a step, or the start of an engine")

COMMANDS = (
    Command("step", "time of a decoding step beside its floor", lambda a: STEP[a.measure](a), (*step.OPTIONS, MEASURE)),
    Command("kernels", "attention and products by themselves, beside their floors", kernels.run, kernels.OPTIONS),
    Command("acceptance", "how much is accepted", acceptance.run, (*acceptance.OPTIONS, *pair.OPTIONS)),
    Command("throughput", "tokens/s at a stated, synthetic acceptance", throughput.run, throughput.OPTIONS),
    Command("serve", "latencies, throughput and acceptance of an engine", serve.run, (*serve.OPTIONS, *pair.OPTIONS)),
    Command("inflate", "a small model in a larger shape that computes the same", inflate.run, inflate.OPTIONS),
)
GONE = {  # commands of earlier versions, and what does the same
    "eval": "lm-eval for scores of tasks, with the address of jspec serve (jspec/server/README.md)",
    "startup": "jspec bench step --measure startup",
    "train": "jspec train, whose lines state the tokens a second",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the six subcommands of `jspec bench` on a parser."""
    commands: Any = parser.add_subparsers(dest="bench", required=True)
    for command in COMMANDS:
        command.add_to(commands)
