"""Test the figures of a batch, and which of two evaluations is the better one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.train.config import TrainConfig
from jspec.train.journal import Journal
from jspec.train.loop import Loop
from jspec.train.material import Material
from jspec.train.measured import Figures, Measured
from jspec.train.pack import Packed
from jspec.train.rows import ahead
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

DEPTH = 7


def test_acceptance_of_documents_shorter_than_the_draft_counts_the_chains_that_fit() -> None:
    documents = [(tokens, np.ones(5, bool)) for tokens, _ in support.documents([5] * 6)]
    rows = support.packed(documents, 48)
    places = jnp.stack([rows.reaches(by) & ahead(rows.counted, by) for by in range(1, DEPTH + 1)])
    hits = np.random.default_rng(1).random(places.shape) < 0.7
    found = Measured.of(on_device(np.zeros(places.shape)), on_device(hits), places).figures()
    expected, held = 1.0, np.asarray(places)
    assert not held.all(axis=0).any()  # no chain has all draft positions
    for depth in range(1, DEPTH + 1):
        chains = [column for column in np.ndindex(held.shape[1:]) if all(held[(k, *column)] for k in range(depth))]
        taken = [column for column in chains if all(hits[(k, *column)] for k in range(depth))]
        expected += len(taken) / len(chains) if chains else 0
    assert found.acceptance == pytest.approx(expected) and expected > 1.5


def test_of_equal_acceptance_the_lower_loss_is_the_better_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse, better, other = (Figures(loss, (0.5,), 1.25) for loss in (3.0, 2.0, 2.5))
    journal = Journal(tmp_path / "journal.jsonl", 0)
    rows = Packed(*(np.zeros((1, 16), np.int32) for _ in range(3)), lines=np.zeros((1, 2), np.int64))
    program: Any = SimpleNamespace(head=lambda state: state)
    loop, written = Loop(TrainConfig(), Material(rows, rows), program, 3), list[Any]()
    best: Figures | None = None
    for step, figures in enumerate((worse, better, other), start=1):
        monkeypatch.setattr(loop, "measure", lambda state, figures=figures: figures)
        state: Any = step
        best = loop._evaluate(state, step, figures, best, journal, written.append)
    assert best == better == journal.best and written == [1, 2]
