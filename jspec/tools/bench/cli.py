"""`jspec bench`: its eight commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jspec.tools.bench import (
    acceptance,
    eval,
    kernels,
    pair,
    serve,
    serve_variants,
    startup,
    step,
    step_controls,
    step_host,
    throughput,
)
from jspec.tools.bench.inflate import convert as inflate
from jspec.tools.bench.report import Command, Option, Report, option

Run = Callable[[argparse.Namespace], Report]
STEP: dict[str, Run] = {
    "step": step.run,
    "controls": step_controls.run,
    "overlap": step_host.run_overlap,
    "host": step_host.run_host,
}
SERVE: dict[str, Run] = {
    "load": serve.run,
    "depths": serve_variants.run_depths,
    "batching": serve_variants.run_batching,
}


def _choice(runs: dict[str, Run], text: str) -> tuple[Run, Option]:
    """A command's `--measure`: the function that follows it, and the option."""

    def run(arguments: argparse.Namespace) -> Report:
        return runs[arguments.measure](arguments)

    return run, option("--measure", choices=list(runs), default=next(iter(runs)), help=text)


run_step, STEP_CHOICE = _choice(STEP, "the step; cost of controls; device's waiting for the host; the host's time")
run_serve, SERVE_CHOICE = _choice(SERVE, "a load; drafts of fixed and chosen depth; batching and overlap")
COMMANDS = (
    Command(
        "step", "time of a decoding step beside its floor", run_step, (*step.OPTIONS, *step_host.OPTIONS, STEP_CHOICE)
    ),
    Command("kernels", "attention and products by themselves, beside their floors", kernels.run, kernels.OPTIONS),
    Command("acceptance", "how much is accepted", acceptance.run, (*acceptance.OPTIONS, *pair.OPTIONS)),
    Command("throughput", "tokens/s at a stated, synthetic acceptance", throughput.run, throughput.OPTIONS),
    Command(
        "serve",
        "latencies, throughput and acceptance of an engine",
        run_serve,
        (*serve.OPTIONS, *serve_variants.OPTIONS, *pair.OPTIONS, SERVE_CHOICE),
    ),
    Command(
        "eval", "whether a task's score or the probabilities are the same", eval.run, (*eval.OPTIONS, *pair.OPTIONS)
    ),
    Command("startup", "seconds until engines serve, without and with a cache", startup.run, startup.OPTIONS),
    Command("inflate", "a small model in a larger shape that computes the same", inflate.run, inflate.OPTIONS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands: Any = parser.add_subparsers(dest="bench", required=True)
    for command in COMMANDS:
        command.add_to(commands)
