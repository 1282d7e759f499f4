"""A browser, and a server with answers made up beforehand, for the tests of the live page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import Browser, chromium

if TYPE_CHECKING:  # see `pytest_configure`
    from tests.support.live_stub import Stub


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    pytest.importorskip("websockets", reason="needs the package websockets")
    executable = chromium()
    if executable is None:
        pytest.skip("needs Chromium: install the package chromium")
    with Browser(executable, tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stub, str]]:
    from tests.support.live_stub import Stub, listening

    stub = Stub()
    with listening(stub.app()) as address:
        yield stub, address


@pytest.fixture
def stub(served: tuple[Stub, str], browser: Browser) -> Stub:
    """The stub with 12 rounds of 60 nodes, and the browser at its page, in the mode for completions."""
    from tests.support.live_stub import Stub, random_round

    one, address = served
    rng = random.Random(0)
    one.__dict__ |= Stub(rounds=[random_round(rng, 60) for _ in range(12)]).__dict__
    browser.resize(1280, 860)
    browser.open("about:blank")
    browser.complaints.clear()
    browser.open(address)
    browser.eval("sessionStorage.clear()")
    browser.wait("document.getElementById('model').textContent === 'stub'")
    browser.eval("setMode('completion')")
    return one
