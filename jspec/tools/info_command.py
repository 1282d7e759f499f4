"""Runs `jspec info`, which describes folders or measures how well a head fits its target."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jspec.tools import demo

CHECK_OPTIONS = ("text", "tokenizer", "max_tokens")  # options that need --check
PROMPTS = 4  # number of prompts that --check continues
MAX_TOKENS = 48  # default number of tokens that it decodes after each prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec info` on a parser."""
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
        help=f"for --check: tokens decoded after each of {PROMPTS} prompts; default: {MAX_TOKENS}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
    from jspec.tools import check_head  # here, because it takes time

    head, target = demo.folder(arguments.check[0], "head"), demo.folder(arguments.check[1], "target")
    if arguments.text is not None:
        options["text"] = arguments.text.read_text(encoding="utf-8")
    print(check_head.check(head, target, **options))
    return 0


def _describe(paths: Sequence[str]) -> int:
    import jax  # here, because they take time

    from jspec.tools import info
    from pallas_kernels import dispatch

    if list(paths) == [demo.NAME]:
        text, is_right = info.inspect_pair([demo.HEAD, demo.DFLASH], demo.TARGET)
    elif len(paths) == 2:
        text, is_right = info.inspect_pair([demo.folder(paths[0], "head")], demo.folder(paths[1], "target"))
    else:
        text, is_right = info.inspect(paths[0])
    print(text)
    print(f"\nkernels on this machine: {dispatch.describe('auto', jax.devices()[0])}")
    return 0 if is_right else 1
