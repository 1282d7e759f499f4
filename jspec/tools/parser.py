"""Defines the argument parser of all commands, whose help texts have defaults and examples."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
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
    "jspec convert": (
        "convert path/to/target path/to/converted --dtype bfloat16",
        "convert path/to/target path/to/converted --quantize fp8 --overwrite",
    ),
    "jspec bench": ("bench acceptance", "bench step --shape tiny --batch 1,4 --tree none chain:4"),
    "jspec bench step": ("bench step", "bench step --batch 1,8,32 --tree none chain:4 --json step.json"),
    "jspec bench kernels": ("bench kernels --kernel attention", "bench kernels --kernel gemm --rows 1,5,61"),
    "jspec bench acceptance": (
        "bench acceptance",
        "bench acceptance --draft dflash --tree chain:7 topk:16,4,4 --accept coupled",
    ),
    "jspec bench throughput": ("bench throughput", "bench throughput --positions 0.8,0.6,0.5,0.4"),
    "jspec bench serve": ("bench serve --slots 4", "bench serve --rate 2 --tree none chain:4"),
    "jspec bench inflate": ("bench inflate demo large", "bench inflate demo large --head demo --head-out large-head"),
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
    """An argument parser that prints an error as one line, without the usage, and two examples in its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Help, **settings})

    def format_help(self) -> str:
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
