"""Defines the argument parser of all commands, whose help texts have defaults and examples."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

HEAD, TARGET = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "meta-llama/Llama-3.1-8B-Instruct"
EXAMPLES = {  # two example command lines for the help of each command
    "jspec": ("demo", "generate --target demo --eagle3 demo 'def main('"),
    "jspec demo": ("demo", "demo > demo.txt"),
    "jspec generate": (
        "generate --target demo --eagle3 demo --max-tokens 64 'def main('",
        f"generate --target {TARGET} --eagle3 {HEAD} --tree topk:60,8,10 --chat 'What is a prime number?'",
    ),
    "jspec chat": (
        f"chat --target {TARGET} --eagle3 {HEAD}",
        f"chat --target {TARGET} --ngram --system 'Answer in one sentence.' --temperature 0.7",
    ),
    "jspec serve": ("serve", f"serve --target {TARGET} --eagle3 {HEAD} --slots 32 --warm logprobs,grammar"),
    "jspec train": (
        "train --target demo --data texts.jsonl --out head --steps 500 --length 256 --learning-rate 3e-3",
        f"train --target {TARGET} --data chats.jsonl --out head --draft-vocab 32000",
    ),
    "jspec info": ("info demo", f"info --check {HEAD} {TARGET}"),
    "jspec heads": ("heads", "heads Qwen/Qwen3-8B"),
    "jspec convert": (
        "convert path/to/target path/to/converted --dtype bfloat16",
        "convert path/to/target path/to/converted --quantize fp8 --overwrite",
    ),
    "jspec bench": (
        "bench acceptance --accept coupled --tree chain:4 --samples 1",
        "bench step --shape tiny --batch 1,4 --tree none chain:4",
    ),
    "jspec bench step": ("bench step", "bench step --batch 1,8,32 --tree none chain:4 --json step.json"),
    "jspec bench acceptance": (
        "bench acceptance --accept coupled --tree chain:4 --samples 1",
        "bench acceptance --draft dflash --tree chain:7 topk:16,4,4 --accept coupled",
    ),
    "jspec bench report": (
        "bench report",
        f"bench report --target {TARGET} --head {HEAD} --prompts mt-bench,gsm8k --batch 1,8 --out report",
    ),
    "jspec bench serve": ("bench serve --slots 4", "bench serve --rate 2 --tree none chain:4"),
    "jspec bench inflate": (
        "bench inflate demo large --shape llama3-8b",
        "bench inflate demo large --shape llama3-8b --draft-vocab-size 2048 --head demo --head-out large-head",
    ),
}


class Help(argparse.HelpFormatter):
    """A help formatter that appends the default of each option to its text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        words = list(default) if isinstance(default, (list, tuple)) else [default]
        is_said = text is None or "default" in text or "if left out" in text
        if is_said or action.nargs == 0 or words in ([None], [argparse.SUPPRESS]):
            return text
        shown = " ".join(str(word).lower() for word in words)
        return f"{text}; default: {shown.replace('%', '%%')}"


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error as one line, without the usage, and two examples in its help.

    Args:
        declare: function that declares the options on this parser when they are first needed; None: it has them.
        settings: arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, *, declare: Callable[[Parser], object] | None = None, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Help, **settings})
        self._declare = declare

    def declare(self) -> None:
        """Declare the options, unless they are declared."""
        if self._declare is not None:
            declare, self._declare = self._declare, None
            declare(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; an unknown one is an error of this parser, not of the one that has it as a subcommand."""
        self.declare()
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [flag for action in self._actions for flag in action.option_strings]
            guesses = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            guess = "".join(f"; did you mean {flag}?" for flag in guesses)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")
        return namespace, unknown

    def format_help(self) -> str:
        self.declare()
        examples = "".join(f"  jspec {line}\n" for line in EXAMPLES.get(self.prog, ()))
        return super().format_help() + (f"\nexamples:\n{examples}" if examples else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def in_flags(self, words: Sequence[str], message: str) -> str:
        """Return an error's message with the flags of a command instead of Python's names of the same options.

        Args:
            words: arguments of the command line; the first ones name the command.
            message: the message; options stand in it as ``name=``, ``name=value``, or with a colon at its start, and
                those with an underscore anywhere.
        """
        self.declare()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words and words[0] in action.choices:
                chosen: Parser = action.choices[words[0]]
                return chosen.in_flags(words[1:], message)
        for name in (action.dest for action in self._actions if action.option_strings):
            flag, alone = f"--{name.replace('_', '-')}", rf"(?<![\w./=-]){name}"
            message = re.sub(rf"^([a-z]\w*: )?{name}: ", rf"\g<1>{flag}: ", message)
            message = re.sub(rf"{alone}=(?=\S)(?![,;)])", f"{flag} ", message)
            message = re.sub(rf"{alone}=", flag, message)
            if "_" in name:
                message = re.sub(rf"{alone}(?![\w/=-]|\.\w)", flag, message)
        return message


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of all its subcommands, with their options."""
    parser.format_help()  # declares them
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)
