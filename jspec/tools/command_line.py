"""Parses the command line, runs the commands, and prints their errors as one line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from jspec import __version__
from jspec.core.foreign_names import FOREIGN_NAMES
from jspec.tools.parser import Parser

COMMANDS = {  # help of each command; its module declares the options, and is imported when they are needed
    "demo": "complete a prompt with a small embedded model, and compare with plain decoding",
    "generate": "complete a prompt",
    "chat": "chat with a model in the terminal",
    "serve": "serve a model over HTTP, with the routes of OpenAI's API",
    "train": "train a draft head for a target",
    "bench": "measure",
    "info": "describe a checkpoint folder, or measure how well a head fits",
    "heads": "list published draft heads by their target",
    "convert": "write an orbax folder",
}
MODULES = {  # else jspec.tools.COMMAND
    "bench": "jspec.tools.bench.cli",
    "info": "jspec.tools.info_command",
    "convert": "jspec.tools.convert_command",
}
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
    **dict.fromkeys(("enable_lora", "max_loras"), "--adapters N of jspec serve"),
    **dict.fromkeys(("lora_modules", "lora_paths"), "--adapter NAME=PATH of jspec serve"),
    "max_lora_rank": "--adapter-rank R of jspec serve",
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
    try:
        arguments = _parsed(words)
    except (ValueError, OSError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    return _run(arguments, words)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        ValueError, OSError: a file with options is wrong or cannot be read.
        SystemExit: an argument is wrong.
    """
    _refuse_foreign(words)
    if words[:1] == ["serve"]:
        words = ["serve", *_module("serve").with_config(words[1:])]
    return make_parser().parse_args(words)


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the parsed command of a command line; print its error as one line, and return the exit status."""
    from jspec import distributed  # here, because it takes time
    from jspec.tools import processes
    from jspec.tools.progress import log_lines

    if isinstance(sys.stdout, io.TextIOWrapper):  # so that no text is lost that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with log_lines() if arguments.command in ("demo", "generate", "chat", "serve", "train") else nullcontext():
            processes.join(arguments)
            arguments.words = tuple(words)
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


def _module(command: str) -> Any:
    """Import the module of a command."""
    return import_module(MODULES.get(command, f"jspec.tools.{command}"))


def _refuse_foreign(words: Sequence[str]) -> None:
    """End with an error if `generate`, `chat` or `serve` gets another project's option."""
    if not words or words[0] not in ("generate", "chat", "serve"):
        return
    parser = Parser(prog=f"jspec {words[0]}")
    _module(words[0]).add_arguments(parser)
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
    """Return the parser of all commands, which declare their options when they are parsed."""
    parser = Parser(prog="jspec", description="Lossless speculative decoding in JAX.")
    parser.add_argument("--version", action="version", version=f"jspec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, declare=partial(_declare, name))
    return parser


def _declare(command: str, parser: Parser) -> None:
    _module(command).add_arguments(parser)
