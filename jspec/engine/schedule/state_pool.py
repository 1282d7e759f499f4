"""The prefix cache of recurrent states: which text has a copy of its state on the device. Runs on the host.

A layer with a recurrent state cannot begin in the middle of a text as attention can, so cached pages alone save such a
target no time. Therefore the device keeps copies of the states that running requests have at multiples of some number
of tokens, and a request begins at the longest text before it that has a copy. The copy that was used least recently is
overwritten first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jspec.engine.schedule.page_pool import Digest


@dataclass(frozen=True)
class StateCopy:
    """A copy of a state between a slot and an entry of the device's copies.

    Attributes:
        slot: slot of the request.
        entry: index of the copy.
        position: number of tokens that the state has seen.
        is_load: whether the slot takes the copy; False: the copy takes the slot's state.
    """

    slot: int
    entry: int
    position: int
    is_load: bool


class StatePool:
    """Knows the copies of states by the digest of their texts.

    A state is kept only where it stands at the end of a page, which is always so if a page has at most ``every`` tokens
    and divides that number; larger pages keep fewer.

    Args:
        entries: number of copies that the device has.
        every: number of tokens of which the position of a slot's state is a multiple.
        page_size: tokens per page; a copy is one of full pages.

    Attributes:
        num_hits: number of requests that began at a copy.
        num_evicted: number of copies that were overwritten by others.
    """

    def __init__(self, entries: int, every: int, page_size: int) -> None:
        self._copy_every, self._state_every, self._page_size = math.lcm(every, page_size), every, page_size
        self._free = list(range(entries - 1, -1, -1))
        self._entry_of: dict[Digest, int] = {}  # the least recently used one first
        self._copies: list[StateCopy] = []
        self.num_hits = self.num_evicted = 0

    @property
    def num_kept(self) -> int:
        """The number of copies."""
        return len(self._entry_of)

    def copy_position(self, rows: int) -> int:
        """Return the largest position of a copy within the first ``rows`` tokens."""
        return rows // self._copy_every * self._copy_every

    def state_position(self, rows: int) -> int:
        """Return the position of the state of a slot with ``rows`` committed rows."""
        return rows // self._state_every * self._state_every

    def match(self, digests: Sequence[Digest], most: int) -> int:
        """Return the position of the longest text that has a copy; 0, where every text begins, if none has one.

        Args:
            digests: digest of each full page of the text.
            most: largest position.
        """
        for position in range(self.copy_position(min(most, len(digests) * self._page_size)), 0, -self._copy_every):
            if digests[position // self._page_size - 1] in self._entry_of:
                return position
        return 0

    def load(self, slot: int, digests: Sequence[Digest], position: int) -> None:
        """Let a slot take the copy at a position that `match` returned."""
        digest = digests[position // self._page_size - 1]
        entry = self._entry_of[digest] = self._entry_of.pop(digest)  # now the most recently used one
        self.num_hits += 1
        self._copies.append(StateCopy(slot, entry, position, is_load=True))

    def save(self, slot: int, digests: Sequence[Digest], position: int) -> None:
        """Keep the state of a slot, which has seen ``position`` tokens, unless it is kept already."""
        digest = digests[position // self._page_size - 1]
        if digest in self._entry_of:
            self._entry_of[digest] = self._entry_of.pop(digest)
            return
        if self._free:
            entry = self._free.pop()
        elif self._entry_of:
            entry = self._entry_of.pop(next(iter(self._entry_of)))
            self.num_evicted += 1
        else:
            return  # the device has no copies
        self._entry_of[digest] = entry
        self._copies.append(StateCopy(slot, entry, position, is_load=False))

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Return the copies to make before the next step, in order, and forget them."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def counts(self) -> dict[str, int]:
        """Return the counters, by their names in `jspec.engine.request.metrics.Metrics`."""
        return {"num_state_hits": self.num_hits, "num_states_evicted": self.num_evicted, "states_kept": self.num_kept}

    def clear(self) -> None:
        """Forget all copies, whose contents were lost."""
        self.forget()
        self._copies.clear()

    def forget(self) -> None:
        """Forget all copies; those to make before the next step are still made."""
        self._free += self._entry_of.values()
        self._entry_of.clear()
