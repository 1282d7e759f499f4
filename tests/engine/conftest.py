"""The engine that the tests of API, recovery and statistics share; files with an engine of their own define theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jspec import Engine
from tests.support import brittle


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The shared engine; after every test no page, slot or request is held, and the engine works."""
    brittle.expected()
    yield brittle.engine()
    brittle.check_idle()


@pytest.fixture
def expected() -> list[list[int]]:
    return brittle.expected()
