"""`jspec bench acceptance`: what it runs, how it counts, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jspec.__main__ import main
from jspec.core.config import ACCEPT_RULES
from jspec.core.tree import Tree
from jspec.engine.metrics import Metrics
from jspec.tools.bench import acceptance

pytestmark = pytest.mark.once

TOKENS, SAMPLES = 12, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small run left what it printed and its results."""
    folder = tmp_path_factory.mktemp("acceptance")
    options = ["--accept", "coupled", "--tree", "chain:4", "--temperature", "0", "1"]
    sizes = ["--tokens", str(TOKENS), "--samples", str(SAMPLES), "--json", str(folder / "results.json")]
    with pytest.MonkeyPatch.context() as patch, open(folder / "printed.txt", "w") as printed:
        patch.setattr("sys.stdout", printed)
        assert main(["bench", "acceptance", *options, *sizes]) == 0
    return folder


def test_rules_meet_the_trees_they_fit() -> None:
    found = {(case.accept, str(case.tree)) for case in acceptance.cases(ACCEPT_RULES, acceptance.TREES)}
    chain, static, dynamic = map(str, acceptance.TREES)
    everywhere = {
        (rule, tree) for rule in ("coupled", "multi_candidate", "typical") for tree in (chain, static, dynamic)
    }
    assert found == everywhere | {("block", chain), ("rejection", chain), ("rejection", static)}


def test_a_rule_without_a_tree_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="needs a chain"):
        acceptance.cases(["block"], [Tree.topk(4, 2, 2)])
    assert main(["bench", "acceptance", "--accept", "block", "--tree", "topk:4,2,2"]) == 2
    assert "needs a chain" in capsys.readouterr().err


def test_prompts_are_different_cuts_of_the_whole_text() -> None:
    cuts = acceptance.prompts()
    assert len(set(cuts)) == acceptance.PROMPTS and {len(cut.encode()) for cut in cuts} == {acceptance.PROMPT_SIZE}
    assert acceptance.SOURCE_TEXT.startswith(cuts[0]) and acceptance.SOURCE_TEXT.endswith(cuts[-1])


def test_with_rounds_alike_the_error_is_that_of_a_mean() -> None:
    """Where every prompt has as many rounds, the jackknife is the standard error of the prompts' means."""
    accepted = np.array([3, 9, 4, 17, 8])
    parts = [Metrics(num_drafts=10, num_accepted_tokens=int(n)) for n in accepted]
    expected = np.std(accepted / 10, ddof=1) / np.sqrt(5)
    assert acceptance.standard_error(parts) == pytest.approx(expected)
    assert acceptance.standard_error(parts[:1] * 5) == pytest.approx(0)
    assert np.std(accepted / 10) / np.sqrt(5) != pytest.approx(expected)  # the spread of the sample itself


@pytest.mark.long
def test_every_completion_counts(folder: Path) -> None:
    """Rounds times their mean length are the tokens behind the first ones; a round cut at the end may lack one."""
    results = json.loads((folder / "results.json").read_text())["results"]
    assert [result["temperature"] for result in results] == [0, 1]
    for result, samples in zip(results, (1, SAMPLES), strict=True):
        completions = acceptance.PROMPTS * samples
        tokens = result["rounds"] * result["length"]
        assert completions * (TOKENS - 1) <= tokens <= completions * TOKENS
        assert result["rounds"] * 4 * result["rate"] == pytest.approx(tokens - result["rounds"])
        assert (
            result["case"] == {"accept": "coupled", "tree": "chain:4", "draft_quantize": None}
            and 0 < result["error"] < 1
        )
    assert results[0]["length"] > results[1]["length"] > 1.3  # the head drafts, and chance makes it harder


@pytest.mark.long
def test_the_table_has_the_results(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())["results"]
    about, heading, _, row = (folder / "printed.txt").read_text().splitlines()
    assert "standard error" in about
    assert heading.split() == ["tree", "accept", "rule", "head", "temperature", "0", "temperature", "1"]
    numbers = [word for r in results for word in (f"{r['length']:.2f}", "±", f"{r['error']:.2f}", f"{r['rate']:.0%}")]
    assert row.split() == ["chain:4", "coupled", "float32", *numbers]


def test_the_lossy_rule_is_named_so() -> None:
    case = acceptance.Case("typical", Tree.static([(0,), (1,), (0, 0)]))
    row = acceptance.text([acceptance.Acceptance(case, 1.0, 2.5, 0.1, 0.5, 10)]).splitlines()[-1]
    assert "typical (lossy)" in row and "static, 4 nodes" in row


def test_the_head_is_quantised_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, quantize: str | None, **__: object) -> None:
        raise InterruptedError(quantize)

    monkeypatch.setattr(acceptance.Eagle3, "from_pretrained", load)
    for kind in (None, "int8"):
        with pytest.raises(InterruptedError, match=str(kind)):
            acceptance.measure(*acceptance.cases(["coupled"], [Tree.chain(4)], kind))
