"""Queues completions once the programs that they need are compiled, which happens in a second thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import final

from jspec.engine.callers.deliveries import Deliveries
from jspec.engine.request.request import Request
from jspec.engine.run.core import EngineCore
from jspec.step.executable_key import ExecutableKey

AT_ONCE = 256  # completions that one call queues or aborts


@final
class LatePrograms:
    """Compiles programs that completions lack, while the engine's thread steps the others; only that thread calls it.

    Args:
        core: the engine's loop, which gets the completions.
        deliveries: the submissions of the thread.
        call: lets the thread call a function between two steps.
    """

    def __init__(self, core: EngineCore, deliveries: Deliveries, call: Callable[[Callable[[], object]], None]) -> None:
        self._core, self._deliveries, self._call = core, deliveries, call
        self._compiler = ThreadPoolExecutor(1, "jspec-compile")
        self._compiles_rounds = False

    def queue(self, samples: Sequence[Request]) -> None:
        """Queue the completions that are not aborted, once the programs of their prefills are compiled."""
        runner = self._core.runner
        samples = [sample for sample in samples if sample.finish_reason is None]
        if missing := runner.missing(runner.choice.prefill_keys(samples)):
            self._compile(missing, samples, self.queue)
            return
        for sample in samples[:AT_ONCE]:
            self._core.add(sample, self._deliveries.submitted_at(sample))
        self._missing_rounds(samples[:AT_ONCE])
        if rest := samples[AT_ONCE:]:
            self._call(partial(self.queue, rest))

    def compile_rounds(self) -> None:
        """Compile what completions with a first token lack of the programs of their rounds, unless this happens."""
        if not self._compiles_rounds and (waiting := self._deliveries.needing_rounds()):
            self._compile_rounds(waiting)

    def stop(self) -> None:
        """Compile no more."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _missing_rounds(self, samples: Sequence[Request]) -> list[ExecutableKey]:
        """Return what completions lack of the programs of their rounds; the scheduler plans no round before that."""
        runner = self._core.runner
        missing = runner.missing(runner.choice.round_keys(samples, self._core.live)) if samples else []
        for sample in samples:
            sample.state.awaits_rounds = bool(missing)
        return missing

    def _compile_rounds(self, samples: Sequence[Request]) -> None:
        samples = [sample for sample in samples if sample.finish_reason is None]
        missing = self._missing_rounds(samples)
        self._compiles_rounds = bool(missing)
        if missing:
            self._compile(missing, samples, self._compile_rounds)

    def _compile(
        self, keys: Sequence[ExecutableKey], samples: Sequence[Request], then: Callable[[Sequence[Request]], None]
    ) -> None:
        """Compile programs in the second thread, and then call a function with the completions that wait for them."""

        def work() -> None:
            try:
                self._core.runner.compile(keys)
            except Exception as error:
                self._call(partial(self._refuse, samples, error))
            else:
                self._call(partial(then, samples))

        try:
            self._compiler.submit(work)
        except RuntimeError as error:  # no thread can be started, or the interpreter ends
            self._refuse(samples, error)

    def _refuse(self, samples: Sequence[Request], error: Exception) -> None:
        """End completions whose programs cannot be compiled."""
        self._compiles_rounds = False
        for sample in samples:
            sample.output.is_refused = True
        self._core.fail([sample for sample in samples if sample.finish_reason is None], error)
