"""Recovery from a failed step, which ends the running requests with an error and recreates the device's state."""

from __future__ import annotations

import logging
from types import TracebackType

from jspec.engine.run.core import EngineCore

RESTART = "the device failed and its state could not be made anew; restart the process"
DONATED = "the weights were donated by their owner; call update_weights with others, or with copy=True"

logger = logging.getLogger(__name__)


class Recovery:
    """A context manager that encloses one step of the engine's loop and recovers from its failure.

    An error inside the context loses the steps in flight (dispatched steps whose results were not read). The running
    requests then end with the error, which is suppressed; the device's state is recreated, and waiting requests go on.

    Attributes:
        healthy: False after the device's state could not be recreated.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.healthy = True

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._recover(error)
        return True

    def _recover(self, error: Exception) -> None:
        """End the running requests with the error and recreate the device's state."""
        logger.error("a step failed; the requests under way end with its error", exc_info=error)
        core = self._core
        if core.runner.has_deleted_weights:
            error = caused_by(error, DONATED)
        core.drop_in_flight()
        core.fail(core.scheduler.running, error)
        try:
            core.runner.reset_state(error)
        except Exception as failure:
            self.healthy = False
            if not core.runner.calls.is_whole:  # the failure says which process is lost
                core.fail(core.waiting, failure)
            else:
                error.add_note(RESTART)
                core.fail(core.waiting, caused_by(error, RESTART))
                logger.exception("the state could not be made anew: restart the process")


def caused_by(cause: BaseException, message: str) -> RuntimeError:
    """Make a RuntimeError with the given message and cause."""
    error = RuntimeError(message)
    error.__cause__ = cause
    return error
