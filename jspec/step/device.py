"""What the engine needs of a device: `jspec.step.side.Side` is one, and tests have one that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from jspec.core.records import Draft
from jspec.draft.base import Drafter
from jspec.models.parts.kv_pool import PoolShape
from jspec.step.executable_key import ExecutableKey, Kind
from jspec.step.memory import MemoryPlan
from jspec.step.program import Params

T = TypeVar("T")


class DevicePrograms(Protocol):
    """The programs of a device: `jspec.step.executables.Executables`."""

    compiled: dict[ExecutableKey, Any]
    seconds: dict[str, float]
    lower_seconds: dict[str, float]
    digests: dict[str, str]

    @property
    def helpers(self) -> Sequence[Kind]:
        """The kinds of the small programs that edit parts of the state."""


class Device(Protocol):
    """Runs the programs of target and drafter, or of one of the two, and holds their state.

    Attributes:
        state: the state of all slots; None once the device is closed.
        draft: what "draft" returned, or another device drafted, until "verify" or "commit" takes it.
    """

    state: Any
    draft: Draft | None

    @property
    def programs(self) -> DevicePrograms:
        """The compiled programs."""

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory of each device, in bytes."""

    def fit(self, pool: PoolShape) -> PoolShape:
        """Return the pools with as many pages as fit; raise a ValueError if the least number does not fit."""

    def explain_oom(self, pool: PoolShape) -> AbstractContextManager[None]:
        """Return a context that replaces an out-of-memory error by one that names settings to lower."""

    def start(self, pool: PoolShape, drafting: Any) -> None:
        """Allocate the state; ``drafting`` is the device whose drafts this one verifies."""

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs run here and are not compiled yet."""

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        """Compile the programs of the keys that run here, except those that are compiled already."""

    def run(self, key: ExecutableKey, *inputs: Any) -> Any:
        """Start a compiled program on the state without waiting for it; return its output, None if it has none."""

    def receive(self, arrays: Any) -> Any:
        """Copy arrays of another device to this one."""

    def wait(self, call: Callable[[], T]) -> T:
        """Return the result of a function that waits for the device."""

    def load_adapter(self, index: int, adapter: Any) -> None:
        """Load an adapter of the target into a table."""

    def use(self, drafter: Drafter, params: Params) -> None:
        """Run later steps with other weights of the same shapes, and with the drafter that was bound to them."""

    def sleep(self) -> None:
        """Free the memory of the state."""

    def wake(self) -> None:
        """Allocate the state again."""

    def reset(self, error: BaseException) -> None:
        """Replace the state by a new one after a failed step with the given error; weights are kept."""

    def close(self) -> None:
        """Free the memory of the state."""
