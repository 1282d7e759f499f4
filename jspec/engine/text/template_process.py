"""The process of `jspec.engine.text.chat_template`, which renders chat templates; it runs this file as a script.

It imports transformers and nothing of jspec.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import IO

ADDED = 2**20  # most characters that a template may add to the messages
SHOWN = 200  # most characters of a jinja2 error that are shown


def serve(tasks: IO[str], answers: IO[str], memory: int) -> None:
    """Read tasks as lines of JSON and write an answer to each, until the tasks end.

    Args:
        tasks: lines with [template, arguments of transformers' function, further variables, variables that the template
            must read, seconds of CPU time].
        answers: receives lines with {"texts": [...]}, {"error": ...} or {"unread": ..., "read": ...}.
        memory: limit of the process's memory in bytes.
    """
    from transformers.utils import chat_template_utils

    with contextlib.suppress(ImportError, ValueError, OSError):  # a system without this limit
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in tasks:
        template, options, variables, wanted, seconds = json.loads(line)
        if hasattr(signal, "ITIMER_PROF"):
            signal.setitimer(signal.ITIMER_PROF, seconds)  # this signal ends the process
        try:
            answer = _unread(template, wanted)
            if not answer:
                options["chat_template"] = template
                texts, _ = chat_template_utils.render_jinja_template(**options, **variables)
                most, size = len(line) + ADDED, max(map(len, texts))
                answer = {"texts": texts} if size <= most else {"error": f"expected {most} characters, got {size}"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:SHOWN]}
        if hasattr(signal, "ITIMER_PROF"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


def _unread(template: str, wanted: Sequence[str]) -> dict[str, str]:
    """Return the first wanted variable that a template never reads, and all that it reads; {} if it reads all."""
    if not wanted:
        return {}
    read = _variables(template)
    missing = [name for name in wanted if name not in read]
    return {"unread": missing[0][:SHOWN], "read": ", ".join(sorted(read))[:SHOWN]} if missing else {}


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads; a template of 16 kB takes about 70 ms."""
    from jinja2 import meta
    from transformers.utils import chat_template_utils

    syntax = chat_template_utils._compile_jinja_template(template).environment
    return frozenset(meta.find_undeclared_variables(syntax.parse(template)) - syntax.globals.keys() - {"messages"})


if __name__ == "__main__":
    channel, sys.stdout = sys.stdout, sys.stderr  # stdout is for answers, so libraries print to stderr
    serve(sys.stdin, channel, int(sys.argv[1]))
