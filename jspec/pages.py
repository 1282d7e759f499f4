"""Which slot owns which page. Host only; the device's page table is a copy of what is decided here."""

from __future__ import annotations

import math


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

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.pages - 1 - len(self._free)

    def needed(self, rows: int) -> int:
        """Pages that hold ``rows`` rows."""
        return math.ceil(rows / self.page_size)

    def can_reserve(self, rows: int) -> bool:
        return self.needed(rows) <= len(self._free)

    def reserve(self, owner: int, rows: int) -> list[int]:
        """Pages for ``rows`` rows of an owner that has none.

        Raises:
            ValueError: the owner has pages already, or not enough are free; nothing is reserved then.
        """
        if owner in self._owned:
            raise ValueError(f"PagePool: owner {owner} has pages already")
        count = self.needed(rows)
        if count > len(self._free):
            raise ValueError(f"PagePool: {count} pages needed for {rows} rows, {len(self._free)} free")
        self._owned[owner] = [self._free.pop() for _ in range(count)]
        return list(self._owned[owner])

    def release(self, owner: int) -> None:
        """Take an owner's pages back; an owner without pages is fine."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check(self) -> None:
        """Assert that every page is free or owned, once."""
        seen = sorted(self._free + [page for pages in self._owned.values() for page in pages])
        assert seen == list(range(1, self.pages)), "pages were lost or handed out twice"
