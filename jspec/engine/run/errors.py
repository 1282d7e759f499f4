"""Recovery from a failed step, which ends the running requests with an error and recreates the device's state."""

from __future__ import annotations

import logging
from types import TracebackType

from jspec.engine.run.core import EngineCore

RESTART = "the device failed and its state could not be made anew; restart the process"

logger = logging.getLogger(__name__)


class Recovery:
    """A context manager that encloses one step of the engine's loop and recovers from its failure.

    An error inside the context loses the steps in flight (dispatched steps whose results were not read). The running
    requests then end with an error, the device's state is recreated, and waiting requests go on. The error itself is
    suppressed. An interrupt while `EngineCore.is_mid_step` has these effects too, but is raised again for the caller.
    An interrupt at any other moment loses nothing and is only raised again.

    Attributes:
        lost: the error whose recovery was interrupted and waits for `resume`; None: no recovery was interrupted.
        healthy: False after the device's state could not be recreated.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.lost: BaseException | None = None
        self.healthy = True

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        is_interrupt = not isinstance(error, Exception)
        if self._core.is_mid_step or not is_interrupt:
            self._recover(error)
        return not is_interrupt

    def resume(self) -> None:
        """Complete the last recovery if it was interrupted."""
        if self.lost is not None:
            self._recover(self.lost)

    def _recover(self, error: BaseException) -> None:
        """End the running requests with the error and recreate the device's state.

        The host's records are updated first, so they are consistent if an interrupt comes while the device is used.
        """
        self.lost = error
        logger.error("a step failed; the requests under way end with its error", exc_info=error)
        self._core.drop_in_flight()
        request_error = error_of_requests(error)
        self._core.fail(self._core.scheduler.running, request_error)
        try:
            self._core.runner.reset_state(error)
        except Exception as failure:
            self.healthy = False
            if not self._core.runner.calls.is_whole:  # the failure says which process is lost
                self._core.fail(self._core.scheduler.waiting, failure)
            else:
                request_error.add_note(RESTART)
                self._core.fail(self._core.scheduler.waiting, caused_by(error, RESTART))
                logger.exception("the state could not be made anew: restart the process")
        self.lost = None


def error_of_requests(error: BaseException) -> Exception:
    """Return the error with which requests end; an interrupt is replaced, because only one caller shall see it."""
    return error if isinstance(error, Exception) else caused_by(error, "a step was interrupted and is lost; ask again")


def caused_by(cause: BaseException, message: str) -> RuntimeError:
    """Make a RuntimeError with the given message and cause."""
    error = RuntimeError(message)
    error.__cause__ = cause
    return error
