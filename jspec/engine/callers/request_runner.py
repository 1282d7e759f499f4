"""What the public calls for prompts (`jspec.engine.callers.text_generator`) need of an engine, or of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import NoReturn, Self

from jspec.core.config import EngineConfig
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk, Request
from jspec.engine.text.tokenizer import Tokenizer


class RequestRunner(ABC):
    """Runs requests to their end.

    Attributes:
        config: the checked options of an engine.
        input_processor: makes requests from prompts.
    """

    config: EngineConfig
    input_processor: InputProcessor

    # -- how requests are run

    @abstractmethod
    def _check_open(self) -> None:
        """Raise a RuntimeError if no request can be served any more."""

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise a ValueError if a request could never be served."""

    @abstractmethod
    def _complete(self, asked: Sequence[Request]) -> Generator[None]:
        """Run requests to their end; yield whenever there may be new output, and abort what remains when closed."""

    @abstractmethod
    async def _acomplete(self, make: Callable[[], list[Request]]) -> list[Request]:
        """Make requests in a thread, run them to their end and return them; if cancelled, abort them."""

    @abstractmethod
    def _submit(self, request: Request) -> None:
        """Queue a request."""

    @abstractmethod
    def _wait(self, request: Request) -> None:
        """Wait until a submitted request has ended."""

    @abstractmethod
    def _abort(self, requests: Sequence[Request]) -> None:
        """End the unfinished ones of a request's completions."""

    @abstractmethod
    def _stream(self, request: Request) -> Iterator[Chunk]:
        """Run a request and yield its chunks; if closed, abort it."""

    @abstractmethod
    def _astream(self, make: Callable[[], Request]) -> AsyncIterator[Chunk]:
        """Make a request in a thread, run it and yield its chunks; if cancelled, abort it."""

    @abstractmethod
    def warmup(
        self, *, logprobs: bool = False, prompt_logprobs: bool = False, trace: bool = False, grammar: bool = False
    ) -> None:
        """Compile the programs of all batch sizes and prompt lengths, and those for requests with these outputs."""

    # -- state

    @property
    @abstractmethod
    def metrics(self) -> Metrics:
        """Return the sums of all requests' counters, and the number of pages in use now."""

    @abstractmethod
    def prometheus(self, model_name: str = "jspec") -> str:
        """Return counters, gauges and latencies (in seconds) as Prometheus text, under vLLM's metric names."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """The number of requests that may run at once."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """The number of pages that requests can hold."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None: prompts and output are token ids."""
        return self.input_processor.tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The token ids that end a request."""
        return self.input_processor.eos_ids

    @abstractmethod
    def close(self) -> None:
        """Abort all requests and free the device memory."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name}: expected an object that can be copied or pickled, got an engine, which holds device memory; make "
            "another engine from its arguments"
        )
