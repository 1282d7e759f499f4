"""`jspec bench`: the command line."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from jspec.bench import acceptance, inflate, report, rounds, shapes
from jspec.config import ACCEPT_RULES
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
    _acceptance_arguments(
        commands.add_parser("acceptance", help="acceptance of the embedded pair by accept rule, temperature and tree")
    )
    inflate.add_arguments(commands.add_parser("inflate", help="a small model in a larger shape that computes the same"))


def _acceptance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accept", nargs="+", choices=ACCEPT_RULES, default=ACCEPT_RULES, metavar="RULE")
    parser.add_argument("--tree", type=Tree.parse, nargs="+", default=acceptance.TREES, metavar="TREE", help=TREE_FORMS)
    parser.add_argument("--temperature", type=float, nargs="+", default=acceptance.TEMPERATURES)
    parser.add_argument("--tokens", type=int, default=acceptance.TOKENS, help="tokens of each completion")
    parser.add_argument("--samples", type=int, default=acceptance.SAMPLES, help="completions a prompt, if sampled")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.set_defaults(run=_acceptance)


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


def _acceptance(arguments: argparse.Namespace) -> int:
    results = []
    for case in acceptance.cases(arguments.accept, arguments.tree):
        results += acceptance.measure(case, arguments.temperature, tokens=arguments.tokens, samples=arguments.samples)
    print(f"tokens a round ± standard error, share of drafted tokens emitted; {report.environment()}")
    print(acceptance.text(results))
    if arguments.json:
        acceptance.write_json(arguments.json, results)
    return 0
