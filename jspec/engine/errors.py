"""When a step has failed: the device memory it held goes, and the requests under way get an error of their own."""

from __future__ import annotations

RESTART = "the device failed and its state could not be made anew; restart the process"


def error_of_requests(error: BaseException) -> Exception:
    """What requests end with: an interrupt is meant for who is interrupted, not for the tasks of others."""
    return error if isinstance(error, Exception) else caused_by(error, "a step was interrupted and is lost; ask again")


def caused_by(cause: BaseException, message: str) -> RuntimeError:
    """An error that says what it means for a request, and why."""
    error = RuntimeError(message)
    error.__cause__ = cause
    return error
