"""Test that a write that fails leaves the earlier file, and that only errors of writing are named as such."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import pytest

from jspec.train.checkpoints import write_errors
from jspec.train.files import write_text
from jspec.train.journal import Journal
from jspec.train.measured import Figures

pytestmark = pytest.mark.once


def full(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_text(file, "earlier")
    journal = Journal(tmp_path / "journal.jsonl", 0)
    journal.add("eval", 1, Figures(1.0, (0.5,), 1.5))
    entries = journal.path.read_text()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "later")
    with pytest.raises(OSError, match="No space left"):
        Journal(journal.path, 1)
    assert file.read_text() == "earlier" and journal.path.read_text() == entries
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "journal.jsonl"]
    monkeypatch.undo()
    write_text(file, "later")
    assert file.read_text() == "later"


def test_an_error_of_the_device_is_not_named_an_error_of_writing(tmp_path: Path) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^RESOURCE_EXHAUSTED"), write_errors(tmp_path, []):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(OSError, match=r"No space left.*no checkpoint yet: make room"), write_errors(tmp_path, []):
        full()
