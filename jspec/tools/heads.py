"""Runs `jspec heads`, which lists published draft heads by their target."""

from __future__ import annotations

import argparse
import difflib

from jspec.draft.published import PublishedHead, heads_of, model_name, published_heads
from jspec.tools.table import table

HEADING = ("target", "draft with", "note", "source: repository of GitHub, commit, file")
ABOUT = """These rows are what their sources say, where their names were checked. Not loaded by us: nobody here has read
the weights of these heads. Measure one on its target before you rely on it: jspec info --check HEAD TARGET"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec heads` on a parser."""
    about = "hub id, folder or name of a target; its exact name counts, without owner; if left out, all targets"
    parser.add_argument("target", nargs="?", metavar="TARGET", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the heads of a target, or all; the exit status is 1 if there are none."""
    heads = published_heads() if arguments.target is None else heads_of(arguments.target)
    if not heads:
        names = {model_name(head.target): head.target for head in published_heads()}
        near = [names[name] for name in difflib.get_close_matches(model_name(arguments.target), names, n=2, cutoff=0.8)]
        hint = f"; other targets with like names: {', '.join(near)}" if near else ""
        print(f"no head of {arguments.target} is in the table, which knows exact names alone{hint}")
        return 1
    print(table_of(heads))
    print(f"\n{ABOUT}")
    return 0


def table_of(heads: list[PublishedHead]) -> str:
    """Return the heads as text, a line each."""
    return table([HEADING, *((head.target, head.option, head.note, head.source) for head in heads)])
