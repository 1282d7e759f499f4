"""Fixtures with the engine that the tests of API, recovery and statistics share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jspec import Engine
from tests.support import brittle


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Yield the shared engine; after each test check that no page, slot or request is held."""
    brittle.expected()
    yield brittle.engine()
    brittle.check_idle()


@pytest.fixture
def expected() -> list[list[int]]:
    return brittle.expected()
