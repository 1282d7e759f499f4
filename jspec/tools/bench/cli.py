"""`jspec bench`: its nine commands."""

from __future__ import annotations

import argparse
from typing import Any

from jspec.tools.bench import acceptance, eval, host, kernels, pair, serve, startup, step, step_costs, throughput, train
from jspec.tools.bench.inflate import convert as inflate
from jspec.tools.bench.report import Command, Report, option

STEP = {"step": step.run, "controls": step_costs.run_controls}
STEP |= {"overlap": step_costs.run_overlap, "host": host.run}
HELP = "the step; cost of controls; device's waiting for the host; the host's time"
MEASURE = option("--measure", choices=list(STEP), default="step", help=HELP)


STEP_OPTIONS = (*step.OPTIONS, *step_costs.OPTIONS, *host.OPTIONS, MEASURE)


def run_step(arguments: argparse.Namespace) -> Report:
    return STEP[arguments.measure](arguments)


COMMANDS = (
    Command("step", "time of a decoding step beside its floor", run_step, STEP_OPTIONS),
    Command("kernels", "attention and products by themselves, beside their floors", kernels.run, kernels.OPTIONS),
    Command("acceptance", "how much is accepted", acceptance.run, (*acceptance.OPTIONS, *pair.OPTIONS)),
    Command("throughput", "tokens/s at a stated, synthetic acceptance", throughput.run, throughput.OPTIONS),
    Command("serve", "latencies, throughput and acceptance of an engine", serve.run, (*serve.OPTIONS, *pair.OPTIONS)),
    Command("eval", "whether a score or the probabilities are the same", eval.run, (*eval.OPTIONS, *pair.OPTIONS)),
    Command("startup", "seconds until engines serve, without and with a cache", startup.run, startup.OPTIONS),
    Command("train", "speed and memory of training a head", train.run, train.OPTIONS),
    Command("inflate", "a small model in a larger shape that computes the same", inflate.run, inflate.OPTIONS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the nine subcommands of `jspec bench` on a parser."""
    commands: Any = parser.add_subparsers(dest="bench", required=True)
    for command in COMMANDS:
        command.add_to(commands)
