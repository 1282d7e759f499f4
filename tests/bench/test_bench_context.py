"""`jspec bench context`: which prompts it makes, how it counts, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import DraftModel, NGram, Tree
from jspec.__main__ import main
from jspec.tools.bench import context
from tests.support import tiny

pytestmark = pytest.mark.once

TARGET, TREE = tiny.model(16, layers=1), Tree.chain(2)
IDS = np.random.default_rng(0).integers(0, 16, 60).tolist()
TOKENS = 10


def test_contexts_of_every_length_end_at_the_same_places() -> None:
    cuts = context.prompts(range(100), (5, 20, 50), 4)
    assert {size: {len(cut) for cut in own} for size, own in cuts.items()} == {5: {5}, 20: {20}, 50: {50}}
    for short, long in zip(cuts[5], cuts[50], strict=True):
        assert long[-5:] == short and long == list(range(long[0], long[0] + 50))
    assert cuts[50][0][0] == 0 and cuts[50][-1][-1] == 99 and len({cut[-1] for cut in cuts[50]}) == 4


@pytest.mark.parametrize(("contexts", "places"), [((), 4), ((0, 8), 4), ((8,), 1), ((99,), 4)])
def test_what_cannot_be_cut_is_refused(contexts: tuple[int, ...], places: int) -> None:
    with pytest.raises(
        ValueError, match=r"expected (context lengths >= 1 and at least 2 places|a text of at least 102)"
    ):
        context.prompts(range(100), contexts, places)


def test_a_drafter_without_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a drafter with a window"):
        context.measure(TARGET, [NGram(TREE)], IDS, contexts=(4,), windows=(8,))


@pytest.mark.long
def test_every_context_and_window_is_measured() -> None:
    """The target drafts for itself: all is accepted, but where a window hides what it looks at."""
    results = context.measure(
        TARGET, [DraftModel(TARGET, TREE)], IDS, contexts=(3, 40), windows=(None, 4), places=3, tokens=TOKENS
    )
    keys = [(one.draft_window, one.context) for one in results]
    assert keys == [(None, 3), (None, 40), (4, 3), (4, 40)]
    for one in results:
        assert 3 * (TOKENS - 1) <= round(one.rounds * one.length) <= 3 * TOKENS
    lengths = dict(zip(keys, [one.length for one in results], strict=True))
    assert lengths[None, 3] == lengths[None, 40] == 3
    assert lengths[4, 40] < 3


def test_the_command_prints_a_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def measure(target: Any, drafters: Any, ids: list[int], **options: Any) -> list[context.ContextAcceptance]:
        asked.update(options, trees=[drafter.tree for drafter in drafters], ids=len(ids))
        return [
            context.ContextAcceptance("chain:2", window, size, 1 + size / 1000, 0.25, 0.5, 7)
            for window in options["windows"]
            for size in options["contexts"]
        ]

    monkeypatch.setattr(context, "measure", measure)
    sizes = ["--context", "512", "256", "--draft-window", "none", "64", "--prompts", "3", "--tokens", "9"]
    assert main(["bench", "context", *sizes, "--tree", "chain:2", "--json", str(tmp_path / "out.json")]) == 0
    assert asked["trees"] == [TREE] and asked["ids"] > 2048 and (asked["places"], asked["tokens"]) == (3, 9)
    _, heading, _, none, window = capsys.readouterr().out.splitlines()
    assert heading.split() == ["tree", "draft", "window", "256", "tokens", "512", "tokens"]
    assert none.split() == ["chain:2", "none", "1.26", "±", "0.25", "1.51", "±", "0.25"]
    assert window.split()[:2] == ["chain:2", "64"]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["draft_window"], r["context"]) for r in results] == [(None, 512), (None, 256), (64, 512), (64, 256)]
