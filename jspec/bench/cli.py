"""`jspec bench`: the command line."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from jspec import demo, diagnose
from jspec.bench import acceptance, accuracy, report, rounds, shapes
from jspec.config import ACCEPT_RULES
from jspec.tree import TREE_FORMS, Tree
from pallas_kernels.quantized import KINDS


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
    _accuracy_arguments(commands.add_parser("accuracy", help="next-token laws of a quantised target beside its own"))
    _acceptance_arguments(
        commands.add_parser("acceptance", help="acceptance of the embedded pair by accept rule, temperature and tree")
    )


def _accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one")
    parser.add_argument("--text", type=Path, metavar="FILE", help="an English and Python text if left out")
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
    parser.add_argument("--dtype", help="of the weights that are not quantised; float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--quantize", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--size", type=int, default=128, help="tokens of a cut of the text")
    parser.set_defaults(run=_accuracy)


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


def _accuracy(arguments: argparse.Namespace) -> int:
    tokenizer = "bytes" if arguments.target == demo.TARGET else arguments.tokenizer
    target, words = diagnose.load_target(arguments.target, tokenizer, dtype=arguments.dtype)
    source = diagnose.TEXT if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    cuts = diagnose.windows(source, words, arguments.size)
    print(f"next-token laws over {len(cuts)} cuts of a text; {report.environment()}")
    print(accuracy.text(accuracy.measure(target, cuts, arguments.quantize)))
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
