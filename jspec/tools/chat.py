"""Runs `jspec chat`, a conversation in the terminal."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO

from jspec.engine.reading.answers import ChatSplitter
from jspec.tools import demo, generate, interrupt, processes
from jspec.tools.colour import has_colours, painted
from jspec.tools.options import add_model_arguments, add_sampling_arguments
from jspec.tools.progress import settled
from jspec.tools.speed_meter import SpeedMeter

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    from jspec import Engine, SamplingParams

HELP = "/reset: forget the conversation; /exit or Ctrl-D: leave; Ctrl-C: stop the answer"
DEMO = "The embedded model is for trying only: it goes on with Python code, such as\ndef main(argv):"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec chat` on a parser."""
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(run=run, max_tokens=1024)


def run(arguments: argparse.Namespace) -> int:
    """Run `jspec chat` until the user leaves.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: an option has an impossible value, or the target's tokenizer has no chat template.
    """
    is_demo = arguments.target == demo.NAME
    tokenizer = generate.prepare(arguments)
    params = generate.sampling(arguments)
    try:
        tokenizer.chat([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        remedy = "pass --chat-template FILE, or name a model that was trained for chats"
        raise ValueError(f"{error} (jspec generate), {remedy}") from error
    engine = generate.make_engine(arguments, tokenizer)
    if sys.stdin.isatty() and importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # with this import, `input` can edit lines and recall earlier ones
    with engine, interrupt.raised():
        if not processes.follows(engine):
            if is_demo:
                print(DEMO)
            ChatSession(engine, params, arguments.system).run()
    return 0


class ChatSession:
    """A conversation that reads the user's messages, prints answers with drafted tokens in colour, and keeps both.

    Args:
        engine: engine with a tokenizer that has a chat template.
        params: sampling parameters of every answer.
        system: system message; None: none.
        out: stream for questions, answers and counters.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None, out: TextIO | None = None) -> None:
        self._engine, self._params = engine, params
        self._out = sys.stdout if out is None else out
        self._has_colours = has_colours(self._out)
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def run(self) -> None:
        """Answer messages from the standard input until /exit or its end."""
        print(HELP, file=self._out)
        while True:
            try:
                message = input("> ").strip()
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=self._out)
                continue
            except EOFError:
                print(file=self._out)
                return
            if message == "/exit":
                return
            if message == "/reset":
                self.messages = list(self._start)
            elif message.startswith("/"):
                print(HELP, file=self._out)
            elif message:
                self.answer(message)

    def answer(self, message: str) -> None:
        """Print the answer to a message, then its speed, and add both to the conversation.

        Reasoning is printed, but not added. If Ctrl-C stops the answer, the printed beginning is added. A message that
        is too long for the engine, or whose answer has not begun, is not added.
        """
        assert self._engine.tokenizer is not None
        question = {"role": "user", "content": message}
        meter, text = SpeedMeter(self._engine, self._params.max_tokens), ""
        try:
            prompt = self._engine.tokenizer.chat([*self.messages, question])
            splitter = ChatSplitter(self._engine.tokenizer, prompt, self._params)
            chunks: Any = self._engine.stream(prompt, splitter.params)
        except ValueError as error:
            print(f"{error}; or forget the conversation with /reset", file=self._out)
            return
        stopped = False
        with closing(chunks):
            try:
                for chunk in settled(meter.watch(chunks)):
                    text += chunk.text or ""
                    print(painted(chunk) if self._has_colours else chunk.text, end="", flush=True, file=self._out)
            except KeyboardInterrupt:
                stopped = True
                print(" (stopped)", end="", file=self._out)
        if stopped and not text:
            print(file=self._out)
            return
        self.messages += [question, {"role": "assistant", "content": splitter.split(text)[0]}]
        print(f"\n({meter.line()})", file=self._out)
