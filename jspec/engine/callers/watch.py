"""Tells which requests have new output after a step: thousands may wait, of which a few run."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.engine.request.request import Chunk, Request
from jspec.engine.run.output_processor import make_chunk


class Watch:
    """The requests whose output is delivered. After a step only those are looked at that have started.

    A request starts before its first output, or before its end if it has none. It counts as started until its end was
    delivered.

    Args:
        requests: requests that are not queued yet.

    Attributes:
        num_sent: number of tokens sent so far of each request whose end was not delivered.
        started: those of these requests that have started, in this order.
    """

    def __init__(self, requests: Sequence[Request] = ()) -> None:
        self.num_sent: dict[Request, int] = {}
        self.started: dict[Request, None] = {}
        self.add(requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests that are not queued yet."""
        for request in requests:
            self.num_sent[request] = 0
            request.output.before_change = self.start
            if request.finish_reason is not None:
                self.start(request)

    def start(self, request: Request) -> None:
        """Note that a request's output is about to change."""
        self.started[request] = None

    def needing_rounds(self) -> list[Request]:
        """Return the running requests that have their first token, but not the programs of their rounds."""
        return [
            request
            for request in self.started
            if request.state.awaits_rounds and request.token_ids and request.finish_reason is None
        ]

    def with_new_output(self) -> list[Request]:
        """Return the requests that have ended or have unsent tokens."""
        return [
            request
            for request in self.started
            if len(request.output.pieces) > self.num_sent[request] or request.finish_reason is not None
        ]

    def next_chunk(self, request: Request) -> Chunk:
        """Make a chunk of a request's unsent tokens, and count them as sent; forget the request if it has ended."""
        chunk = make_chunk(request, self.num_sent[request])
        self.num_sent[request] += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._forget(request)
        return chunk

    def _forget(self, request: Request) -> None:
        """Drop a request, and its reference to this object, so that the two are no cycle."""
        request.output.before_change = None
        del self.num_sent[request]
        self.started.pop(request, None)
