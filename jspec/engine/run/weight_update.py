"""What becomes of an engine's requests when its weights change or it sleeps, and what an update reports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal, get_args

from jspec.core.shorten import short
from jspec.engine.request.request import Request
from jspec.engine.run.core import EngineCore

RequestsMode = Literal["retract", "keep", "abort", "wait"]


@dataclass(frozen=True)
class WeightUpdate:
    """What an update of an engine's weights did.

    Attributes:
        version: version of the weights from now on.
        seconds: seconds that the call took; waiting for requests included.
        nbytes: bytes of the new weights, of target and drafter.
        num_aborted: number of requests that the update ended.
        num_retracted: number of running requests that compute their rows anew.
        num_kept: number of running requests that keep the rows of the old weights.
        pages_forgotten: number of pages that the prefix cache lost.
    """

    version: int
    seconds: float
    nbytes: int
    num_aborted: int = 0
    num_retracted: int = 0
    num_kept: int = 0
    pages_forgotten: int = 0

    def __add__(self, other: WeightUpdate) -> WeightUpdate:
        """Return the sums of the updates of two engines to the same version."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "version"}
        return WeightUpdate(self.version, **sums)


def check_mode(call: str, requests: str, modes: tuple[str, ...] = get_args(RequestsMode)) -> None:
    """Raise a ValueError unless this is a mode in which a call treats requests."""
    if requests not in modes:
        raise ValueError(f"{call}: requests: expected one of {', '.join(map(repr, modes))}, got {short(requests)}")


def settle(core: EngineCore, requests: str, unfinished: Collection[Request]) -> dict[str, int]:
    """Treat an engine's requests, with no step in flight; return their numbers by the names of `WeightUpdate`.

    Args:
        requests: the mode; with "wait" the requests have ended.
        unfinished: all requests that were submitted and have not ended, queued or not.
    """
    if requests == "abort":
        for request in unfinished:
            core.finish(request, "abort")
        return {"num_aborted": len(unfinished)}
    if requests == "keep":
        return {"num_kept": len(core.scheduler.running)}
    return {"num_retracted": core.scheduler.retract()}
