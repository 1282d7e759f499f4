"""Fixtures with the engine that the tests of API, recovery and statistics share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # see `pytest_configure`
    from jspec import Engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Yield the shared engine; after each test check that no page, slot or request is held."""
    from tests.support import brittle

    brittle.expected()
    yield brittle.engine()
    brittle.check_idle(brittle.engine())


@pytest.fixture
def expected() -> list[list[int]]:
    from tests.support import brittle

    return brittle.expected()
