"""The page allocator: every page has one owner or none, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jspec.pages import PagePool


class Pages(RuleBasedStateMachine):
    """Owners come and go; a dictionary is the model."""

    @initialize(pages=st.integers(2, 20), page_size=st.integers(1, 5))
    def start(self, pages: int, page_size: int) -> None:
        self.pool, self.owned = PagePool(pages, page_size), {}

    @rule(owner=st.integers(0, 5), rows=st.integers(1, 40))
    def reserve(self, owner: int, rows: int) -> None:
        count = -(-rows // self.pool.page_size)
        fits = count <= self.pool.num_free
        assert self.pool.can_reserve(rows) == fits
        if owner in self.owned or not fits:
            free = self.pool.num_free
            with pytest.raises(ValueError, match="has pages already" if owner in self.owned else "free"):
                self.pool.reserve(owner, rows)
            assert self.pool.num_free == free, "a refused reservation took pages"
            return
        self.owned[owner] = self.pool.reserve(owner, rows)
        assert len(self.owned[owner]) == count

    @rule(owner=st.integers(0, 5))
    def release(self, owner: int) -> None:
        self.owned.pop(owner, None)
        self.pool.release(owner)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        self.pool.check()
        taken = [page for pages in self.owned.values() for page in pages]
        assert len(set(taken)) == len(taken) and all(0 < page < self.pool.pages for page in taken)
        assert (self.pool.num_used, self.pool.num_free) == (len(taken), self.pool.pages - 1 - len(taken))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_returned_list_is_the_callers_own() -> None:
    pool = PagePool(4, 2)
    pool.reserve(1, 4).clear()
    pool.release(1)
    pool.check()
    assert pool.num_used == 0


def test_check_sees_a_lost_and_a_doubled_page() -> None:
    """Negative controls."""
    lost, doubled = PagePool(5, 1), PagePool(5, 1)
    lost._free.pop()
    doubled._free.append(3)
    for pool in (lost, doubled):
        with pytest.raises(AssertionError, match="lost or handed out twice"):
            pool.check()


@pytest.mark.parametrize(("pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_an_impossible_pool_is_refused(pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"pages >= 2 and page_size >= 1, got {pages} and {page_size}"):
        PagePool(pages, page_size)
