"""Renders chat templates in a separate process, with limits of CPU time, memory and length.

A chat template is a program that comes with a checkpoint. It could take any amount of time and memory, and would hold
the interpreter's lock meanwhile. The process imports transformers only, renders one conversation after another, and
ends with its parent. A conversation takes about a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

from jspec.engine.text import template_process
from jspec.engine.text.conversation import FAILED, MarkedCopy, calls_as_texts, forms, read_roles, wrong_arguments

SECONDS, GIB = 5.0, 1.0  # limits: seconds of CPU time for one conversation, and GiB of memory for the process
PATIENCE = 12  # a process without an answer after PATIENCE times the CPU limit of one conversation is ended


class UnreadVariable(ValueError):
    """A variable or an input that a chat template never reads.

    Args:
        name: its name.
        read: names of those that the template reads.
    """

    def __init__(self, name: str, read: str) -> None:
        self.name = name
        super().__init__(
            f"{name}: expected one of the variables that the chat template reads ({read or 'none'}), got one that it "
            "never reads; leave it out or correct its name"
        )


@final
class ChatTemplate:
    """Renders conversations with a tokenizer's chat template; its process starts with the first conversation.

    Args:
        name: the tokenizer's folder, for error messages.
        seconds: limit of CPU time for one conversation, in seconds.
        gib: limit of the process's memory in GiB, where the system supports one (Linux).
    """

    def __init__(self, name: object, seconds: float = SECONDS, gib: float = GIB) -> None:
        self._name, self._seconds, self._gib = name, seconds, gib
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | str = False,
        add_generation_prompt: bool | None = None,
        **inputs: Any,
    ) -> str:
        """Return the text of a conversation up to the assistant's next answer.

        Args:
            tokenizer: a tokenizer of transformers, which has the template and the special tokens.
            messages: mappings as `jspec.engine.text.conversation.read_roles` takes them; the template gets the first
                form of `jspec.engine.text.conversation.forms` that it reads whole. Values that are None are left out.
            chat_template: name of one of the tokenizer's templates, or a template; None: the tokenizer's choice.
            chat_template_kwargs: further variables of the template.
            continue_final_message: whether the last message goes on; a text is the key under which it goes on.
            add_generation_prompt: whether the assistant's next message begins; None: unless the last one goes on.
            inputs: the template's "tools" and "documents".

        Raises:
            TypeError: a message is not a mapping, or has values that JSON cannot represent.
            ValueError: there is no such template, or it raises an error, leaves a message out of the text, never reads
                one of the variables or inputs that are given and not empty, or takes too much time, memory or text.
        """
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        options = {"add_generation_prompt": begins, "continue_final_message": continue_final_message, **inputs}
        variables = dict(chat_template_kwargs or {})
        wanted = [*(name for name, value in inputs.items() if value), *variables]
        template = self._choose(tokenizer, chat_template, inputs.get("tools"))
        special, end = {**tokenizer.special_tokens_map, **variables}, time.monotonic() + self._seconds
        read, faults = read_roles(messages, template), list[str]()
        copy = MarkedCopy(read)
        read, copy.messages = (calls_as_texts(each, template) for each in (read, copy.messages))
        for both in forms(read, copy, faults):
            task = [template, {**options, "conversations": both}, special, wanted, 2 * self._seconds]
            answer = self._ask(_to_json(task))
            fault = f"{FAILED}{answer['error']}" if "error" in answer else copy.fault(answer["texts"][1])
            if not fault:
                return answer["texts"][0]
            faults.append(fault)
            if time.monotonic() > end:
                break
        fault = min(faults, key=lambda fault: fault.startswith(FAILED))  # what is left out says more than a failure
        raise ValueError((fault.startswith(FAILED) and wrong_arguments(messages)) or fault)

    def _choose(self, tokenizer: Any, name: str | None, tools: Any) -> str:
        """Return the template of this name, or ``name`` itself if it is a template, or the tokenizer's choice."""
        templates = tokenizer.chat_template
        if name is not None and "{" not in name and not (isinstance(templates, dict) and name in templates):
            names = ", ".join(sorted(templates)) if isinstance(templates, dict) else "none, it has a single template"
            raise ValueError(
                f"chat_template: expected a template or the name of one of the tokenizer's templates ({names}), "
                f"got {name[:200]!r}; leave it out for the tokenizer's choice"
            )
        return tokenizer.get_chat_template(name, tools)

    def _ask(self, task: str) -> dict[str, Any]:
        if self._owner != os.getpid():  # in a forked child, the process and the lock are the parent's
            self._owner, self._lock, self._process = os.getpid(), threading.Lock(), None
        with self._lock:
            answer, code = self._ask_once(task)
            if code == -signal.SIGKILL:  # ended from outside, perhaps between two conversations
                answer, code = self._ask_once(task)
        if code == -signal.SIGKILL or (code is not None and code >= 0):
            raise RuntimeError(f"{self._name}: the process that renders chat templates ended with {code}; try again")
        if "unread" in answer:
            raise UnreadVariable(answer["unread"], answer["read"])
        return answer or {"error": f"it takes more than {self._seconds:g} seconds of CPU time or {self._gib:g} GiB"}

    def _ask_once(self, task: str) -> tuple[dict[str, Any], int | None]:
        """Return (answer, None) from the process, or ({}, return code) if the process has ended by itself."""
        process, self._process = self._process or self._start(), None
        timer = threading.Timer(self._seconds * PATIENCE, process.send_signal, [signal.SIGTERM])
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{task}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            self._process = process  # only a process that has answered serves the next conversation
        except (OSError, ValueError):  # the process has ended: the line is empty or incomplete
            return {}, process.wait()
        finally:
            timer.cancel()
            if self._process is None:
                _end(process)
        return answer, None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", template_process.__file__, str(int(self._gib * 2**30))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },  # the memory limit counts each thread's stack
        )
        weakref.finalize(self, _end, process)
        return process


def _to_json(task: list[Any]) -> str:
    """Return a task in JSON, on one line; the errors are those of `ChatTemplate.render`."""
    try:
        return json.dumps(task)
    except RecursionError:
        raise ValueError("messages: expected values that are not nested so deep") from None
    except TypeError as error:
        raise TypeError(
            f"messages: expected messages, tools and other values that JSON can represent, got an error: {error}"
        ) from None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):  # closing flushes, and the process has ended
                pipe.close()
