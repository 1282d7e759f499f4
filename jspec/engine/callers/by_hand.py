"""An engine whose turns its caller makes, for measurements of steps."""

from __future__ import annotations

import threading
from typing import Any, Self

from jspec.engine.callers.api import Engine
from jspec.engine.callers.clients import Ending
from jspec.engine.input.caller_input import Prompt
from jspec.engine.request.request import Completion, Request
from jspec.engine.run.output_processor import make_completion


class ByHand:
    """A context in which an engine's own thread waits, and the caller's thread makes the turns.

    Args:
        engine: the engine; other threads must not wait for its requests meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._endings = engine, dict[Request, Ending]()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            self._is_over.wait()

        threads = self.engine.threads
        threads.check_open()
        threads.start()
        threads.call(wait)
        waits.wait()
        threads.turned_by = threading.current_thread()
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.threads.turned_by = None
        self._is_over.set()

    def submit(self, prompt: Prompt, params: Any = None, **fields: Any) -> Request:
        """Submit a prompt; the next turn queues it."""
        request = self.engine.prepare(prompt, params, **fields)
        ending = self._endings[request] = Ending()
        self.engine.threads.submit({ending: request}, ending.take, whole=True)
        return request

    def step(self) -> bool:
        """Make one turn, or wait for a compilation; return False if there was nothing to do."""
        threads = self.engine.threads
        has_work = threads.turn()
        if not has_work and threads.num_unfinished:
            threads.wait()
            return True
        return has_work

    def abort(self, request: Request) -> None:
        """Abort a request; the next turn carries this out."""
        self.engine.threads.abort(self._endings[request])

    def result(self, request: Request) -> Completion:
        """Make turns until a request has ended."""
        while any(sample.finish_reason is None for sample in request.samples):
            self.step()
        return make_completion(request)
