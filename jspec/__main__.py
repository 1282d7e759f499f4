"""The command line: ``jspec COMMAND`` is ``python -m jspec COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jspec.core.config import ACCEPT_RULES, KV_DTYPES, QUANTIZE
from jspec.core.tree import TREE_FORMS, Tree
from jspec.draft.base import Drafter
from jspec.draft.draft_model import DraftModel
from jspec.draft.eagle import Eagle, Eagle3
from jspec.draft.medusa import Medusa
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix
from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools import check_head, convert, demo
from jspec.tools.bench import cli as bench
from jspec.tools.info import describe
from jspec.tools.parser import Parser
from pallas_kernels import dispatch

PRETRAINED: dict[str, Callable[..., Drafter]] = {
    "eagle3": Eagle3.from_pretrained,
    "eagle": Eagle.from_pretrained,
    "medusa": Medusa.from_pretrained,
    "draft_model": DraftModel.from_pretrained,
}
QUANTIZABLE = ("eagle3", "eagle", "draft_model")
TREE = "chain:4"
CHECK_OPTIONS = ("text", "tokenizer", "max_tokens")  # options of `info` that need --check


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the command line.

    Args:
        argv: command-line arguments without the program's name; None: the arguments of the process.

    Returns:
        The exit status: 0 on success; 2 if arguments or files are wrong, after an error message of one line. A command
        may define further values.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["convert"]:
        return convert.main(words[1:])
    arguments = make_parser().parse_args(words)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands except `convert`, which has a parser of its own."""
    parser = Parser(prog="jspec", description="Lossless speculative decoding in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="plain and speculative decoding of the embedded models").set_defaults(run=_demo)
    _generate_arguments(commands.add_parser("generate", help="complete a prompt"))
    bench.add_arguments(commands.add_parser("bench", help="measure"))
    _info_arguments(commands.add_parser("info", help="describe a checkpoint folder, or measure how well a head fits"))
    commands.add_parser("convert", help="write an orbax folder; see jspec convert --help", add_help=False)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    return demo.run()


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", help="folder or hub id to describe")
    parser.add_argument(
        "--check",
        nargs=2,
        metavar=("HEAD", "TARGET"),
        help="measure a head on its target, with its own and with other rope thetas, feature layers and norms",
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="for --check: text like that of the requests, chat template included"
    )
    parser.add_argument("--tokenizer", help='for --check: "bytes" for byte-level models; default: the target folder\'s')
    parser.add_argument(
        "--max-tokens", type=int, help=f"for --check: tokens decoded after each of {check_head.PROMPTS} prompts"
    )
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    given = {name: value for name in CHECK_OPTIONS if (value := getattr(arguments, name)) is not None}
    if (arguments.path is None) == (arguments.check is None):
        raise ValueError("info: expected a folder or --check HEAD TARGET, one of the two")
    if arguments.check is None:
        if given:
            raise ValueError(
                f"info: expected {', '.join(given)} with --check HEAD TARGET alone; leave it out or add that"
            )
        print(describe(arguments.path))
        print(f"kernels: {dispatch.describe('auto', jax.devices()[0])}")
        return 0
    if arguments.text is not None:
        given["text"] = arguments.text.read_text(encoding="utf-8")
    print(check_head.check(*arguments.check, **given))
    return 0


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt")
    parser.add_argument("--target", required=True, metavar="PATH", help="folder or hub id")
    drafters = parser.add_mutually_exclusive_group()
    drafters.add_argument("--eagle3", metavar="PATH", help="draft with an EAGLE-3 head")
    drafters.add_argument("--eagle", metavar="PATH", help="draft with an EAGLE-1 or EAGLE-2 head")
    drafters.add_argument("--medusa", metavar="PATH", help="draft with Medusa heads")
    drafters.add_argument("--draft-model", metavar="PATH", help="draft with a smaller model")
    drafters.add_argument("--ngram", action="store_true", help="draft what followed the newest tokens earlier")
    drafters.add_argument("--suffix", action="store_true", help="draft what most often followed the newest tokens")
    parser.add_argument("--tree", help=f"draft tree: {TREE_FORMS}; default: {TREE}")
    parser.add_argument("--accept", default=ACCEPT_RULES[0], metavar="RULE", help=", ".join(ACCEPT_RULES))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", help="dtype of the weights; default: float32 on CPU, bfloat16 elsewhere")
    kinds, dtypes = ", ".join(QUANTIZE), ", ".join(KV_DTYPES)
    parser.add_argument("--quantize", metavar="KIND", help=f"quantise the target's weights: {kinds}")
    parser.add_argument("--draft-quantize", metavar="KIND", help="quantise an EAGLE head or a draft model")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help=f"dtype of the target's cache: {dtypes}; default: the weights'"
    )
    parser.add_argument("--draft-kv-dtype", metavar="DTYPE", help="dtype of the drafter's cache")
    parser.add_argument("--draft-window", type=int, metavar="W", help="newest tokens that the drafter attends to")
    parser.add_argument("--max-len", type=int, help="most tokens with the prompt; default: 2048, or the model's limit")
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; default: the target folder\'s')
    parser.add_argument("--compile-cache", metavar="DIR", help="folder that keeps compiled programs for the next start")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    engine = Engine.from_pretrained(
        arguments.target,
        drafter=_drafter(arguments),
        dtype=arguments.dtype,
        slots=1,
        **({} if arguments.max_len is None else {"max_len": arguments.max_len}),
        accept=arguments.accept,
        quantize=arguments.quantize,
        kv_dtype=arguments.kv_dtype,
        draft_kv_dtype=arguments.draft_kv_dtype,
        draft_window=arguments.draft_window,
        compile_cache=arguments.compile_cache,
        tokenizer=arguments.tokenizer,
    )
    with engine:
        for chunk in engine.stream(arguments.prompt, params):
            print(chunk.text, end="", flush=True)
        print()
        metrics = engine.metrics
        print(
            f"{metrics.num_tokens} tokens, {metrics.num_drafts} rounds, "
            f"mean acceptance length {metrics.mean_acceptance_length:.2f}",
            file=sys.stderr,
        )
    return 0


def _drafter(arguments: argparse.Namespace) -> Drafter | None:
    tree = Tree.parse(TREE if arguments.tree is None else arguments.tree)
    quantize = {} if arguments.draft_quantize is None else {"quantize": arguments.draft_quantize}
    if quantize and not any(getattr(arguments, name) for name in QUANTIZABLE):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in QUANTIZABLE)
        raise ValueError(f"--draft-quantize: expected one of {names}, got none of them; leave it out")
    for name, load in PRETRAINED.items():
        if path := getattr(arguments, name):
            return load(path, tree=tree, dtype=arguments.dtype, **quantize)
    if arguments.ngram:
        return NGram(tree)
    if arguments.suffix:
        return Suffix(tree)
    if arguments.tree is not None:
        raise ValueError("--tree: expected a drafter that drafts it, got none; name one, --ngram for instance")
    return None


if __name__ == "__main__":
    sys.exit(main())
