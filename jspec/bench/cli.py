"""`jspec bench`: the command line."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from jspec.bench import report, rounds, shapes
from jspec.tree import TREE_FORMS, Tree


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _tree(text: str) -> Tree | None:
    return None if text == "none" else Tree.parse(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="bench", required=True)
    step = commands.add_parser("step", help="time of one round over batch, draft length and context, beside its floor")
    step.add_argument("--shape", choices=sorted(shapes.TARGETS), default="llama3-8b")
    step.add_argument("--batch", type=_ints, default=[1], metavar="1,8,32")
    step.add_argument(
        "--tree", type=_tree, nargs="+", default=[None, Tree.chain(4)], metavar="TREE", help=f"none, {TREE_FORMS}"
    )
    step.add_argument("--context", type=_ints, default=[1024])
    step.add_argument("--page-size", type=_ints, default=[16])
    step.add_argument("--dtype", default="bfloat16")
    step.add_argument("--implementation", default="auto")
    step.add_argument("--sampled", action="store_true", help="temperature 1 instead of greedy")
    step.add_argument("--json", type=Path, help="also write the results there")
    step.set_defaults(run=_step)


def _step(arguments: argparse.Namespace) -> int:
    target = shapes.random_target(arguments.shape, arguments.dtype)
    head = shapes.random_head(arguments.shape, arguments.dtype) if any(arguments.tree) else None
    results = []
    for page, context, batch, tree in product(arguments.page_size, arguments.context, arguments.batch, arguments.tree):
        case = rounds.Case(
            shape=arguments.shape,
            batch=batch,
            context=context,
            tree=tree,
            page_size=page,
            dtype=arguments.dtype,
            implementation=arguments.implementation,
            greedy=not arguments.sampled,
        )
        results.append(rounds.measure(case, target, head))
    print(f"one round, drafted by an EAGLE-3 head, random weights, acceptance about 0; {report.environment()}")
    print(report.timings(results))
    if arguments.json:
        report.write_json(arguments.json, results)
    return 0
