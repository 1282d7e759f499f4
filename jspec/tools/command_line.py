"""Parses the command line, runs the commands, and prints their errors as one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path

import jax

from jspec import __version__, distributed
from jspec.core.foreign_names import FOREIGN_NAMES
from jspec.tools import chat, check_head, convert, demo, generate, info, serve, train
from jspec.tools.bench import cli as bench
from jspec.tools.parser import Parser
from jspec.tools.progress import log_lines
from pallas_kernels import dispatch

CHECK_OPTIONS = ("text", "tokenizer", "max_tokens")  # options of `info` that need --check
TREE_OPTION = "--tree chain:K"
DRAFTER_OPTIONS = "--eagle3, --draft-model or another drafter"
FOREIGN_OPTIONS = {  # options of other projects' commands that `FOREIGN_NAMES` lacks or that are no `name=` there
    "model": "--target",
    "model_path": "--target",
    "num_speculative_tokens": TREE_OPTION,
    "speculative_model": DRAFTER_OPTIONS,
    "speculative_config": f"{DRAFTER_OPTIONS}, and {TREE_OPTION}",
    "assistant_model": "--draft-model",
    "data_parallel_size": "--replicas of jspec serve",
    "dp_size": "--replicas of jspec serve",
    "prompt_lookup_num_tokens": f"--ngram {TREE_OPTION}",
    "do_sample": "--temperature 1",
    "system_prompt": "--system",
    "api_key": "--api-key-file FILE, or the variable JSPEC_API_KEY",
    "prompt": "the text alone, as an argument of jspec generate",
}


def run(words: Sequence[str]) -> int:
    """Run one command.

    Args:
        words: command-line arguments without the program's name.

    Returns:
        The exit status (`jspec.__main__.main`).
    """
    if words[:1] == ["convert"]:
        return convert.main(words[1:])
    _refuse_foreign(words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that no text is lost that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if words[:1] == ["serve"]:
            words = ["serve", *serve.with_config(words[1:])]
        arguments = make_parser().parse_args(words)
        with log_lines() if arguments.command in ("demo", "generate", "chat", "serve", "train") else nullcontext():
            generate.join(arguments)
            status = arguments.run(arguments)
            print(end="", flush=True)  # here, where a broken pipe is handled
            return status
    except BrokenPipeError as error:  # nobody reads the output any more, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python prints an error when it ends
        distributed.fail(error)
        return 1
    except (ValueError, OSError, NotImplementedError, ImportError, distributed.ProcessLost) as error:
        print(f"jspec: {make_parser().in_flags(words, str(error))}", file=sys.stderr)
        distributed.fail(error)
        return 2


def _refuse_foreign(words: Sequence[str]) -> None:
    """End with an error if a command is gone, or `generate`, `chat` or `serve` gets another project's option."""
    if words[:1] == ["bench"] and (gone := bench.GONE.get(" ".join(words[1:2]))):
        Parser(prog="jspec bench").error(f"{words[1]} is no command of jspec bench; instead: {gone}")
    commands = {"generate": generate, "chat": chat, "serve": serve}
    if not words or words[0] not in commands:
        return
    parser = Parser(prog=f"jspec {words[0]}")
    commands[words[0]].add_arguments(parser)
    known = set(vars(parser.parse_args(["--target", "none"]))) - {"prompt"}
    for word in words[1 : words.index("--")] if "--" in words else words[1:]:
        name = word.split("=")[0].replace("_", "-")
        hint = foreign_hint(name[2:].replace("-", "_"), known) if name.startswith("--") else None
        if hint is not None:
            parser.error(f"{name} is no option of {parser.prog}; {hint}")


def foreign_hint(name: str, known: Collection[str]) -> str | None:
    """Return what to write for an option of another project's command; None if it is one of ours or unknown.

    Args:
        name: the option's name with underscores, without dashes in front.
        known: names of our options, in the same form.
    """
    if name in known:
        return None
    if name in FOREIGN_OPTIONS:
        return f"instead: {FOREIGN_OPTIONS[name]}"
    hint = FOREIGN_NAMES.get(name)
    if hint is None or hint.startswith("no such option"):
        return hint and hint.removeprefix("no such option, ")
    ours = hint.removesuffix("=")
    return f"instead: --{ours.replace('_', '-')}" if ours in known else f"from Python: {hint}"


def make_parser() -> Parser:
    """Return the parser of all commands except `convert`, which has a separate parser."""
    parser = Parser(prog="jspec", description="Lossless speculative decoding in JAX.")
    parser.add_argument("--version", action="version", version=f"jspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "complete a prompt with a small embedded model, and compare with plain decoding"
    commands.add_parser("demo", help=about).set_defaults(run=_demo)
    generate.add_arguments(commands.add_parser("generate", help="complete a prompt"))
    chat.add_arguments(commands.add_parser("chat", help="chat with a model in the terminal"))
    serve.add_arguments(commands.add_parser("serve", help="serve a model over HTTP, with the routes of OpenAI's API"))
    train.add_arguments(commands.add_parser("train", help="train a draft head for a target"))
    bench.add_arguments(commands.add_parser("bench", help="measure"))
    _info_arguments(commands.add_parser("info", help="describe a checkpoint folder, or measure how well a head fits"))
    commands.add_parser("convert", help="write an orbax folder; see jspec convert --help", add_help=False)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    return demo.run()


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help='folder or hub id to describe, or "demo": the embedded target and its heads; of two, a head and its'
        " target, also whether they fit",
    )
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
        "--max-tokens",
        type=int,
        help=f"for --check: tokens decoded after each of {check_head.PROMPTS} prompts; "
        f"default: {check_head.MAX_TOKENS}",
    )
    parser.set_defaults(run=_info)


def _info(arguments: argparse.Namespace) -> int:
    """Run `jspec info`; the exit status is 1 if a described folder cannot be loaded, or two folders do not fit."""
    options = {name: value for name in CHECK_OPTIONS if (value := getattr(arguments, name)) is not None}
    if (not arguments.paths) == (arguments.check is None) or len(arguments.paths) > 2:
        raise ValueError("info: expected a folder, HEAD TARGET, or --check HEAD TARGET; give one of the three")
    if arguments.check is None:
        if options:
            raise ValueError(
                f"info: expected {', '.join(options)} with --check HEAD TARGET alone; leave it out or add that"
            )
        return _describe(arguments.paths)
    head, target = demo.folder(arguments.check[0], "head"), demo.folder(arguments.check[1], "target")
    if arguments.text is not None:
        options["text"] = arguments.text.read_text(encoding="utf-8")
    print(check_head.check(head, target, **options))
    return 0


def _describe(paths: Sequence[str]) -> int:
    if list(paths) == [demo.NAME]:
        text, is_right = info.inspect_pair([demo.HEAD, demo.DFLASH], demo.TARGET)
    elif len(paths) == 2:
        text, is_right = info.inspect_pair([demo.folder(paths[0], "head")], demo.folder(paths[1], "target"))
    else:
        text, is_right = info.inspect(paths[0])
    print(text)
    print(f"kernels: {dispatch.describe('auto', jax.devices()[0])}")
    return 0 if is_right else 1
