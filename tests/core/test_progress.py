"""The progress bar of slow work: shown on a terminal, hidden elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from jspec.core.progress import progress_bar

pytestmark = pytest.mark.once


class BarTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "is_shown"), [(BarTerminal(), True), (io.StringIO(), False)])
def test_progress_bar_is_shown_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, is_shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with progress_bar(3, "compiling", "programs") as bar:
        bar.update()
        bar.refresh()
    assert ("compiling" in stderr.getvalue() and "1/3" in stderr.getvalue()) == is_shown
    assert bool(stderr.getvalue()) == is_shown
