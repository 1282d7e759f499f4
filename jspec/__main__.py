"""The command line: ``jspec COMMAND`` is ``python -m jspec COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import convert.__main__
from jspec import demo
from jspec.bench import cli as bench
from jspec.describe import describe
from jspec.draft import Drafter
from jspec.draft.eagle import Eagle3
from jspec.draft.model import DraftModel
from jspec.engine import Engine
from jspec.requests import SamplingParams
from jspec.tree import Tree


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error that a user can mend is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="jspec", description="Lossless speculative decoding in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="the embedded pair, plain against speculative").set_defaults(run=_demo)
    _generate_arguments(commands.add_parser("generate", help="complete a prompt"))
    bench.add_arguments(commands.add_parser("bench", help="measure"))
    info = commands.add_parser("info", help="what a checkpoint folder holds")
    info.add_argument("path", help="folder or hub id")
    info.set_defaults(run=_info)
    commands.add_parser("convert", help="Hugging Face folder to orbax folder; see jspec convert --help", add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["convert"]:
        return convert.__main__.main(words[1:])
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2


def _demo(arguments: argparse.Namespace) -> int:
    return demo.run()


def _info(arguments: argparse.Namespace) -> int:
    print(describe(arguments.path))
    return 0


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt")
    parser.add_argument("--target", required=True, metavar="PATH", help="folder or hub id")
    drafters = parser.add_mutually_exclusive_group()
    drafters.add_argument("--eagle3", metavar="PATH", help="an EAGLE-3 head drafts")
    drafters.add_argument("--draft-model", metavar="PATH", help="a smaller model drafts")
    parser.add_argument("--tree", default="chain:4", help="chain:LENGTH")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", help="of the weights; float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
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
        max_len=arguments.max_len,
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
    tree = Tree.parse(arguments.tree)
    if arguments.eagle3:
        return Eagle3.from_pretrained(arguments.eagle3, tree=tree, dtype=arguments.dtype)
    if arguments.draft_model:
        return DraftModel.from_pretrained(arguments.draft_model, tree=tree, dtype=arguments.dtype)
    return None


if __name__ == "__main__":
    sys.exit(main())
