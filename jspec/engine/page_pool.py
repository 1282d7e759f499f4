"""Which request holds which page, and what pages hold for others. Host only; the device's page table is a copy.

A page whose rows are all committed may be kept under a digest of its tokens and of all tokens before them. Requests
that begin alike share such pages, while they live and after: a page that nobody holds any more stays until another is
needed, and then those go first that were given back first. Target and draft use the same pages, so one index serves.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

Digest = bytes


def page_digests(tokens: Sequence[int], page_size: int, before: Digest = b"") -> list[Digest]:
    """The chained digests of the full pages of a text, or of what follows a page with the digest ``before``."""
    digests = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[start : start + page_size], "<i4").tobytes()
        before = hashlib.blake2b(before + page, digest_size=16).digest()
        digests.append(before)
    return digests


class PagePool:
    """Hands out pages of the pools that target and draft share. Page 0 is the null page and never handed out.

    Args:
        pages: pages in a pool, the null page included.
        page_size: rows a page holds.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2 or page_size < 1:
            raise ValueError(f"PagePool: expected pages >= 2 and page_size >= 1, got {pages} and {page_size}")
        self.page_size = page_size
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._holders = [0] * pages
        self._digest_of: dict[int, Digest] = {}
        self._page_of: dict[Digest, int] = {}
        self._idle: dict[int, None] = {}  # kept pages that nobody holds, the first to go first
        self.given_back = 0  # pages, over its life

    @property
    def num_free(self) -> int:
        """Pages that a request may have: free ones, and kept ones that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.pages - 1 - self.num_free

    @property
    def num_kept(self) -> int:
        """Pages whose tokens may be met again, held or not."""
        return len(self._page_of)

    def needed(self, rows: int) -> int:
        """Pages that hold ``rows`` rows."""
        return -(-rows // self.page_size)

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """The kept pages of a text, from its beginning up to the first that is not kept."""
        found: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def is_kept(self, digest: Digest) -> bool:
        return digest in self._page_of

    def can_reserve(self, rows: int, shared: Sequence[int] = ()) -> bool:
        """Whether `reserve` would succeed for an owner that has no pages."""
        idle = sum(page in self._idle for page in shared)
        return self.needed(rows) - len(shared) <= self.num_free - idle

    def reserve(self, owner: int, rows: int, shared: Sequence[int] = ()) -> list[int]:
        """Pages for ``rows`` rows of an owner that has none.

        Args:
            shared: kept pages, from `match`, that are its first ones.

        Raises:
            ValueError: the owner has pages already, or not enough are free; nothing is reserved then.
        """
        if owner in self._owned:
            raise ValueError(f"PagePool: owner {owner} has pages already")
        if not self.can_reserve(rows, shared):
            raise ValueError(f"PagePool: {self.needed(rows)} pages needed for {rows} rows, {self.num_free} free")
        for page in shared:
            self._idle.pop(page, None)
            self._holders[page] += 1
        self._owned[owner] = list(shared)
        self._extend(owner, rows)
        return list(self._owned[owner])

    def grow(self, owner: int, rows: int) -> bool:
        """See to it that an owner has pages for ``rows`` rows; False, and nothing done, where not enough are free."""
        lacking = self.needed(rows) - len(self._owned[owner])
        if lacking > 0:
            if lacking > self.num_free:
                return False
            self._extend(owner, rows)
        return True

    def shrink(self, owner: int, rows: int) -> None:
        """Take back the pages, at the end and nobody else's, that ``rows`` rows do not need."""
        owned = self._owned[owner]
        while len(owned) > self.needed(rows):
            self._give_back(owned.pop())

    def pages_of(self, owner: int) -> list[int]:
        return self._owned[owner]

    def keep(self, owner: int, digests: Sequence[Digest], first: int = 0) -> None:
        """Let others find the owner's pages from its ``first`` one on, one a digest.

        A text that is kept already stays where it is.
        """
        for page, digest in zip(self._owned[owner][first:], digests, strict=False):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def release(self, owner: int) -> None:
        """Take an owner's pages back; an owner without pages is fine.

        Of the pages kept, those at the end of its text will go before those at the beginning, which are of more use.
        """
        for page in reversed(self._owned.pop(owner, [])):
            self._give_back(page)

    def forget(self) -> None:
        """Keep nothing: what the pages hold is lost, or of no use any more."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._digest_of.clear()
        self._page_of.clear()

    def check(self) -> None:
        """Assert that every page is free, idle or held by as many owners as counted, and one of these only."""
        held = Counter(page for pages in self._owned.values() for page in pages)
        assert sorted([*self._free, *self._idle, *held]) == list(range(1, self.pages)), (
            "pages were lost or handed out twice"
        )
        assert all(self._holders[page] == held[page] for page in range(self.pages)), "holders were miscounted"
        assert all(self._digest_of[page] == digest for digest, page in self._page_of.items()), "the index is wrong"
        assert len(self._page_of) == len(self._digest_of) and self._idle.keys() <= self._digest_of.keys()
        assert all(page in self._digest_of for page, count in held.items() if count > 1), "a page has two owners"

    def _give_back(self, page: int) -> None:
        self.given_back += 1
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._digest_of:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _extend(self, owner: int, rows: int) -> None:
        owned = self._owned[owner]
        for _ in range(self.needed(rows) - len(owned)):
            page = self._free.pop() if self._free else self._evict()
            self._holders[page] = 1
            owned.append(page)

    def _evict(self) -> int:
        """The page that was given back first, no longer kept."""
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._digest_of.pop(page)]
        return page
