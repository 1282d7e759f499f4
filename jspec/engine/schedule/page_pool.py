"""Allocation of cache pages to requests, and the prefix cache of full pages. Runs on the host.

A page holds the cache rows of consecutive tokens. A page whose rows are all committed may be cached under a digest of
its tokens and of all tokens before them. Requests with a common prefix share cached pages. A cached page without an
owner stays until its memory is needed; the page that was given back first is evicted first. Target and draft use the
same page numbers, so one index serves both. The device's page table is a copy of the allocation.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

Digest = bytes


def page_digests(tokens: Sequence[int], page_size: int, before: Digest = b"") -> list[Digest]:
    """Compute a digest of each full page of a token sequence, from the tokens of the page and of all pages before.

    Args:
        page_size: tokens per page.
        before: digest of the page before ``tokens``; before a text's first page, the salt of those who may share it.
    """
    digests = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[start : start + page_size], "<i4").tobytes()
        before = hashlib.blake2b(before + page, digest_size=16).digest()
        digests.append(before)
    return digests


class PagePool:
    """Allocates the pages that target and draft share. Page 0, the null page, is never allocated.

    A page is in one of three states: free, owned by one or more requests, or idle (cached and without an owner).

    Args:
        pages: number of pages in a pool, the null page included.
        page_size: cache rows per page.

    Attributes:
        num_given_back: number of times that an owner gave back a page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2 or page_size < 1:
            raise ValueError(f"PagePool: expected pages >= 2 and page_size >= 1, got {pages} and {page_size}")
        self.page_size = page_size
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))
        self._owned: dict[int, list[int]] = {}
        self._dropped: dict[int, int] = {}  # number of pages that an owner dropped, by owner
        self._num_owners = [0] * pages
        self._digest_of: dict[int, Digest] = {}
        self._page_of: dict[Digest, int] = {}
        self._idle: dict[int, None] = {}  # idle pages in the order of eviction
        self.num_given_back = 0

    @property
    def num_free(self) -> int:
        """The number of pages that can be reserved, which are the free and the idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.pages - 1 - self.num_free

    def needed(self, rows: int) -> int:
        """Return the number of pages that ``rows`` cache rows need."""
        return -(-rows // self.page_size)

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Return the cached pages of the given digests, in order, up to the first digest that is not cached."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_cached(self, digest: Digest) -> bool:
        return digest in self._page_of

    def can_reserve(self, rows: int, shared: Sequence[int] = ()) -> bool:
        """Return whether `reserve` with these arguments would succeed for an owner without pages."""
        idle = sum(page in self._idle for page in shared)
        return self.needed(rows) - len(shared) <= self.num_free - idle

    def reserve(self, owner: int, rows: int, shared: Sequence[int] = ()) -> list[int]:
        """Reserve pages for ``rows`` cache rows of an owner without pages; return the pages in order of their rows.

        Args:
            owner: id of the request.
            shared: cached pages, from `match`, that become the owner's first pages.

        Raises:
            ValueError: the owner has pages already, or too few pages are free; then nothing is reserved.
        """
        if owner in self._owned:
            raise ValueError(f"PagePool: owner {owner} has pages already")
        if not self.can_reserve(rows, shared):
            raise ValueError(f"PagePool: {self.needed(rows)} pages needed for {rows} rows, {self.num_free} free")
        for page in shared:
            self._idle.pop(page, None)
            self._num_owners[page] += 1
        self._owned[owner] = list(shared)
        self._extend(owner, rows)
        return list(self._owned[owner])

    def grow(self, owner: int, rows: int) -> bool:
        """Extend an owner's pages to ``rows`` cache rows; return False and change nothing if too few pages are free."""
        if self.needed(rows) - len(self._owned[owner]) > self.num_free:
            return False
        self._extend(owner, rows)
        return True

    def shrink(self, owner: int, rows: int) -> None:
        """Give back the pages at the end of an owner's pages that its first ``rows`` cache rows do not need."""
        owned = self._owned[owner]
        while len(owned) > self.needed(rows):
            self._give_back(owned.pop())

    def drop(self, owner: int, rows: int) -> None:
        """Give back the pages that hold only some of an owner's first ``rows`` cache rows; page 0 takes their place.

        Args:
            owner: id of the request.
            rows: number of rows at the beginning that no later step reads.
        """
        owned = self._owned[owner]
        for index in range(self._dropped.get(owner, 0), rows // self.page_size):
            self._give_back(owned[index])
            owned[index] = 0
            self._dropped[owner] = index + 1

    def pages_of(self, owner: int) -> list[int]:
        """Return an owner's pages in order of their rows; 0 stands for a page that was dropped."""
        return self._owned[owner]

    def cache(self, owner: int, digests: Sequence[Digest], first: int = 0) -> None:
        """Put consecutive pages of an owner into the prefix cache.

        A digest that is in the cache already keeps its page there. Dropped pages are skipped.

        Args:
            digests: digest of each page to cache, in order.
            first: index of the first page to cache among the owner's pages.
        """
        for page, digest in zip(self._owned[owner][first:], digests, strict=False):
            if page and digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def release(self, owner: int) -> None:
        """Give back all pages of an owner; an owner without pages is ignored.

        The last pages are evicted before the first ones, because more requests can share the first ones.
        """
        dropped = self._dropped.pop(owner, 0)
        for page in reversed(self._owned.pop(owner, [])[dropped:]):
            self._give_back(page)

    def clear(self) -> None:
        """Empty the prefix cache."""
        self.forget_idle()
        self._digest_of.clear()
        self._page_of.clear()

    def forget_idle(self) -> int:
        """Take all idle pages out of the prefix cache; return their number."""
        count = len(self._idle)
        for page in self._idle:
            del self._page_of[self._digest_of.pop(page)]
        self._free.extend(self._idle)
        self._idle.clear()
        return count

    def check(self) -> None:
        """Assert that every page is in exactly one state and that its number of owners was counted correctly."""
        owned = Counter(page for pages in self._owned.values() for page in pages if page)
        dropped = {owner: pages.count(0) for owner, pages in self._owned.items() if 0 in pages}
        assert dropped == self._dropped, "dropped pages were miscounted"
        assert sorted([*self._free, *self._idle, *owned]) == list(range(1, self.pages)), (
            "pages were lost or allocated twice"
        )
        assert all(self._num_owners[page] == owned[page] for page in range(self.pages)), "owners were miscounted"
        assert all(self._digest_of[page] == digest for digest, page in self._page_of.items()), "the index is wrong"
        assert len(self._page_of) == len(self._digest_of) and self._idle.keys() <= self._digest_of.keys()
        assert all(page in self._digest_of for page, count in owned.items() if count > 1), "a page has two owners"

    def _give_back(self, page: int) -> None:
        self.num_given_back += 1
        self._num_owners[page] -= 1
        if self._num_owners[page]:
            return
        if page in self._digest_of:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _extend(self, owner: int, rows: int) -> None:
        owned = self._owned[owner]
        for _ in range(self.needed(rows) - len(owned)):
            page = self._free.pop() if self._free else self._evict()
            self._num_owners[page] = 1
            owned.append(page)

    def _evict(self) -> int:
        """Take the page that has been idle longest out of the prefix cache; return the page."""
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._digest_of.pop(page)]
        return page
