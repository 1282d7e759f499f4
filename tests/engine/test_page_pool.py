"""Test that after any operations each page of the pool is free, idle, or has as many owners as the pool counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jspec.engine.schedule.page_pool import Digest, PagePool, page_digests

pytestmark = pytest.mark.once

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)  # only two distinct tokens, so that prefixes repeat


class Pages(RuleBasedStateMachine):
    """A state machine in which owners reserve, share, grow, cache and release pages; dictionaries model the pool."""

    @initialize(pages=st.integers(2, 14), page_size=st.integers(1, 4))
    def start(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.owned: dict[int, list[int]] = {}
        self.kept: dict[int, tuple[int, ...]] = {}  # tokens up to the end of each cached page
        self.idle: list[int] = []  # in the order of eviction

    @rule(owner=st.integers(0, 4), text=TEXTS, extra=st.integers(0, 6))
    def reserve(self, owner: int, text: list[int], extra: int) -> None:
        rows, size = len(text) + extra, self.pool.page_size
        shared = self.pool.match(page_digests(text, size))
        assert shared == self.expected_match(text)
        needed = -(-rows // size) - len(shared)
        fits = needed <= self.free() - sum(page in self.idle for page in shared)
        assert self.pool.can_reserve(rows, shared) == fits
        if owner in self.owned or not fits:
            before = self.pool.num_free
            with pytest.raises(ValueError, match="has pages already" if owner in self.owned else "free"):
                self.pool.reserve(owner, rows, shared)
            assert self.pool.num_free == before, "a refused reservation took pages"
            return
        self.idle = [page for page in self.idle if page not in shared]
        self.take(owner, self.pool.reserve(owner, rows, shared), shared)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), more=st.integers(0, 8))
    def grow(self, data: st.DataObject, more: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        had, size = self.owned[owner], self.pool.page_size
        fits = -(-more // size) <= self.free()
        assert self.pool.grow(owner, len(had) * size + more) == fits
        now = list(self.pool.pages_of(owner))
        assert now[: len(had)] == had and len(now) == len(had) + (-(-more // size) if fits else 0)
        self.take(owner, now, had)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), text=TEXTS)
    def keep(self, data: st.DataObject, text: list[int]) -> None:
        """Record that an owner's cache rows hold this text; check that its shared pages hold these tokens."""
        owner, size = data.draw(st.sampled_from(sorted(self.owned))), self.pool.page_size
        if 0 in self.owned[owner]:
            return
        known = [self.kept[page] for page in self.owned[owner] if page in self.kept]
        text = [*(known[-1] if known else ()), *text]
        first = data.draw(st.integers(0, len(known)))
        self.pool.cache(owner, page_digests(text, size)[first:], first=first)
        for column, page in enumerate(self.owned[owner]):
            beginning = tuple(text[: (column + 1) * size])
            is_full = len(beginning) == (column + 1) * size
            if is_full and column >= first and page not in self.kept and beginning not in self.kept.values():
                self.kept[page] = beginning

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), rows=st.integers(0, 24))
    def drop(self, data: st.DataObject, rows: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        least = self.owned[owner].count(0)
        count = max(min(rows // self.pool.page_size, len(self.owned[owner])), least)
        gone = [page for page in self.owned[owner][:count] if page]
        self.pool.drop(owner, count * self.pool.page_size)
        self.owned[owner] = [0] * count + self.owned[owner][count:]
        held = {page for pages in self.owned.values() for page in pages}
        self.idle += [page for page in gone if page in self.kept and page not in held]

    @rule(owner=st.integers(0, 4))
    def release(self, owner: int) -> None:
        pages = self.owned.pop(owner, [])
        self.pool.release(owner)
        held = {page for others in self.owned.values() for page in others}
        self.idle += [page for page in reversed(pages) if page in self.kept and page not in held]

    @precondition(lambda self: not self.owned)
    @rule()
    def forget(self) -> None:
        self.pool.clear()
        self.kept, self.idle = {}, []

    def take(self, owner: int, pages: list[int], had: list[int]) -> None:
        """Take the pages that a reservation must get: free pages first, then idle ones in the order of eviction."""
        new = pages[len(had) :]
        evicted = [page for page in new if page in self.idle]
        assert evicted == self.idle[: len(evicted)], "another page should have gone first"
        assert not evicted or self.pool.num_free == len(self.idle) - len(evicted), "a free page was passed over"
        self.idle = self.idle[len(evicted) :]
        for page in evicted:
            del self.kept[page]
        self.owned[owner] = pages

    def expected_match(self, text: list[int]) -> list[int]:
        where, size = {beginning: page for page, beginning in self.kept.items()}, self.pool.page_size
        found: list[int] = []
        for end in range(size, len(text) + 1, size):
            if tuple(text[:end]) not in where:
                break
            found.append(where[tuple(text[:end])])
        return found

    def free(self) -> int:
        held = {page for pages in self.owned.values() for page in pages if page}
        return self.pool.pages - 1 - len(held)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        holders = Counter(page for pages in self.owned.values() for page in pages if page)
        assert all(0 < page < self.pool.pages for page in holders)
        assert all(page in self.kept for page, count in holders.items() if count > 1)
        assert [self.pool._num_owners[page] for page in sorted(holders)] == [holders[page] for page in sorted(holders)]
        assert (self.pool.num_used, self.pool.num_free) == (len(holders), self.free())
        assert len(self.pool._page_of) == len(self.kept) and list(self.pool._idle) == self.idle

    def teardown(self) -> None:
        """Check that without owners every page can be reserved."""
        if hasattr(self, "pool"):
            for owner in list(self.owned):
                self.release(owner)
            assert self.pool.num_free == self.pool.pages - 1
            self.pool.reserve(9, (self.pool.pages - 1) * self.pool.page_size)
            self.pool.check()


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=20)


def forgets_num_owners(self: PagePool, owner: int) -> None:
    """Free a page although it has other owners."""
    for page in self._owned.pop(owner, []):
        self._num_owners[page] = 0
        (self._idle.update({page: None}) if page in self._digest_of else self._free.append(page))


def newest_first(self: PagePool) -> int:
    page = list(self._idle)[-1]
    del self._idle[page]
    del self._page_of[self._digest_of.pop(page)]
    return page


@pytest.mark.parametrize(("name", "broken"), [("release", forgets_num_owners), ("_evict", newest_first)])
def test_page_pool_state_machine_with_a_broken_pool_fails(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    """Negative controls: one method of the pool is wrong."""
    monkeypatch.setattr(PagePool, name, broken)
    quick = settings(TestPages.settings, max_examples=2000, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Pages, settings=quick)


def test_page_digests_of_a_text_with_another_first_token_all_differ() -> None:
    """Digests computed from an earlier digest on equal those of the whole text."""
    text = [1, 2, 3, 4, 5, 6, 7]
    whole = page_digests(text, 2)
    assert len(whole) == 3 and page_digests(text[2:], 2, whole[0]) == whole[1:]
    other = page_digests([9, *text[1:]], 2)
    assert not set(other) & set(whole)
    collected: set[Digest] = {page_digests([a, b], 2)[0] for a in range(20) for b in range(20)}
    assert len(collected) == 400


def test_page_pool_that_is_full_evicts_last_pages_of_the_oldest_owner_first() -> None:
    pool = PagePool(5, 1)
    digests = page_digests([1, 2, 3, 4], 1)
    first, second = pool.reserve(1, 2), pool.reserve(2, 2)
    pool.cache(1, digests[:2])
    pool.cache(2, page_digests([7, 8], 1))
    pool.release(1)
    pool.release(2)
    assert pool.match(digests) == first
    assert pool.reserve(3, 3) == [first[1], first[0], second[1]]
    assert pool.match(digests) == [] and pool.match(page_digests([7, 8], 1)) == [second[0]]


def test_page_pool_whose_returned_list_is_edited_stays_unchanged() -> None:
    pool = PagePool(4, 2)
    pool.reserve(1, 4).clear()
    pool.release(1)
    pool.check()
    assert pool.num_used == 0


def test_page_pool_check_with_lost_doubled_or_miscounted_pages_fails() -> None:
    """Negative controls of the pool's check."""
    lost, doubled, miscounted = PagePool(5, 1), PagePool(5, 1), PagePool(5, 1)
    lost._free.pop()
    doubled._free.append(3)
    miscounted._num_owners[2] = 1
    for pool, message in (
        (lost, "lost or allocated twice"),
        (doubled, "lost or allocated twice"),
        (miscounted, "miscounted"),
    ):
        with pytest.raises(AssertionError, match=message):
            pool.check()


@pytest.mark.parametrize(("pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_page_pool_of_impossible_sizes_raises(pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"pages >= 2 and page_size >= 1, got {pages} and {page_size}"):
        PagePool(pages, page_size)


def test_page_pool_with_dropped_pages_does_not_cache_them() -> None:
    pool, text = PagePool(9, 2), [1, 2, 3, 4, 5, 6]
    pages = pool.reserve(0, 6)
    pool.drop(0, 3)
    assert pool.pages_of(0) == [0, *pages[1:]] and pool.num_used == 2
    pool.cache(0, page_digests(text, 2))
    assert pool.match(page_digests(text, 2)[1:]) == pages[1:] and pool.match(page_digests(text, 2)) == []
    pool.release(0)
    pool.check()
    assert pool.num_used == 0
