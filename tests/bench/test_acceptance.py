"""`jspec bench acceptance`: measured cases, counts of steps and tokens, printed table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DFlash, DraftModel, Eagle3
from jspec.__main__ import main
from jspec.core.config import ACCEPT_RULES
from jspec.core.tree import Tree
from jspec.draft.auto import load_drafter
from jspec.engine.request.metrics import Metrics
from jspec.tools import demo
from jspec.tools.bench import acceptance, pair
from jspec.tools.bench.acceptance import AcceptanceCase, MeasuredAcceptance, text_places
from jspec.tools.bench.options import MEASURED
from jspec.tools.bench.pair import BenchPair
from jspec.tools.bench.prompt_sets import SAMPLED
from jspec.tools.bench.results import table_of
from jspec.tools.command_line import make_parser
from tests.support import tiny

pytestmark = pytest.mark.once

TOKENS, SAMPLES = 12, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the printed output and the JSON results of one small run."""
    folder = tmp_path_factory.mktemp("acceptance")
    options = ["--accept", "coupled", "--tree", "chain:4", "--temperature", "0", "1"]
    sizes = ["--tokens", str(TOKENS), "--samples", str(SAMPLES), "--json", str(folder / "results.json")]
    with pytest.MonkeyPatch.context() as patch, open(folder / "printed.txt", "w") as printed:
        patch.setattr("sys.stdout", printed)
        assert main(["bench", "acceptance", *options, *sizes]) == 0
    return folder


def test_acceptance_cases_combine_each_rule_with_the_trees_it_supports() -> None:
    found = {(case.accept, str(case.tree)) for case in acceptance.cases(ACCEPT_RULES, MEASURED)}
    chain, static, dynamic = map(str, MEASURED)
    everywhere = {
        (rule, tree) for rule in ("coupled", "multi_candidate", "typical") for tree in (chain, static, dynamic)
    }
    drawn = {(rule, tree) for rule in ("rejection", "traversal") for tree in (chain, static)}
    assert found == everywhere | drawn | {("block", chain)}


def test_acceptance_cases_with_a_look_up_are_the_head_the_look_up_and_both_as_they_can_be_joined() -> None:
    static = str(MEASURED[1])
    found = {case.drafts for case in acceptance.cases(["block"], MEASURED, lookup="ngram")}
    assert found == {"head", "ngram", "head+ngram, replace"}
    found = {(str(case.tree), case.drafts) for case in acceptance.cases(["rejection"], MEASURED, lookup="suffix")}
    assert found == {
        *(("chain:4", drafts) for drafts in ("head", "suffix", "head+suffix, replace")),
        *((static, drafts) for drafts in ("head", "suffix", "head+suffix, beside")),
    }
    found = {str(case.tree) for case in acceptance.cases(["coupled"], MEASURED, lookup="ngram", join="replace")}
    assert found == {"chain:4"}
    with pytest.raises(ValueError, match="--join replace a chain"):
        acceptance.cases(["block"], MEASURED, lookup="ngram", join="beside")


@pytest.mark.long
def test_acceptance_command_with_a_look_up_counts_the_tokens_of_each_source(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    words = ["--tree", "chain:4", "--accept", "coupled", "--temperature", "0", "--tokens", "24", "--context", "128"]
    file = tmp_path / "out.json"
    assert main(["bench", "acceptance", "--lookup", "ngram", "--join", "beside", *words, "--json", str(file)]) == 0
    head, lookup, both = json.loads(file.read_text())["results"]
    assert [one["case"]["drafts"] for one in (head, lookup, both)] == ["head", "ngram", "head+ngram, beside"]
    assert all(one[name] is None for one in (head, lookup) for name in ("head", "lookup"))
    assert both["head"] > 0 and both["lookup"] > 0
    assert 1 + both["head"] + both["lookup"] == pytest.approx(both["length"])
    assert both["length"] > max(head["length"], lookup["length"])
    *_, heading, _, _, _, row = capsys.readouterr().out.splitlines()
    assert "by head  by look-up" in heading and row.split()[-2:] == [f"{both[name]:.2f}" for name in ("head", "lookup")]


def test_acceptance_command_with_a_tree_that_the_rule_does_not_support_raises(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="needs a chain"):
        acceptance.cases(["block"], [Tree.topk(4, 2, 2)])
    assert main(["bench", "acceptance", "--accept", "block", "--tree", "topk:4,2,2"]) == 2
    assert "needs a chain" in capsys.readouterr().err


def test_acceptance_standard_error_for_equal_step_counts_is_that_of_prompt_means() -> None:
    """If all prompts have equal numbers of steps, the jackknife gives the standard error of their means."""
    accepted = np.array([3, 9, 4, 17, 8])
    parts = [Metrics(num_drafts=10, num_accepted_tokens=int(n)) for n in accepted]
    expected = np.std(accepted / 10, ddof=1) / np.sqrt(5)
    assert acceptance.standard_error(parts) == pytest.approx(expected)
    assert acceptance.standard_error(parts[:1] * 5) == pytest.approx(0)
    assert np.std(accepted / 10) / np.sqrt(5) != pytest.approx(expected)  # the spread of the sample itself


@pytest.mark.long
def test_acceptance_command_steps_times_mean_length_equal_emitted_tokens(folder: Path) -> None:
    """Each prompt's first token belongs to no step; the last step of a completion may be cut by a token."""
    results = json.loads((folder / "results.json").read_text())["results"]
    assert [result["temperature"] for result in results] == [0, 1]
    for result, samples in zip(results, (1, SAMPLES), strict=True):
        completions = SAMPLED * samples
        tokens = result["rounds"] * result["length"]
        assert completions * (TOKENS - 1) <= tokens <= completions * TOKENS
        assert result["rounds"] * 4 * result["rate"] == pytest.approx(tokens - result["rounds"])
        assert (
            result["case"]
            == {
                "accept": "coupled",
                "tree": "chain:4",
                "draft_quantize": None,
                "draft_window": None,
                "context": None,
                "drafts": None,
            }
            and 0 < result["error"] < 1
        )
    assert results[0]["length"] > results[1]["length"] > 1.3  # the head drafts, and chance makes it harder


@pytest.mark.long
def test_acceptance_table_numbers_equal_those_of_the_json_file(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())["results"]
    about, heading, _, *rows = (folder / "printed.txt").read_text().splitlines()
    assert "standard error" in about
    assert heading.split() == ["accept", "rule", "tree", "temperature", "tokens", "a", "step", "±", "emitted", "steps"]
    for row, r in zip(rows, results, strict=True):
        numbers = [f"{r['temperature']:g}", f"{r['length']:.2f}", f"{r['error']:.2f}", f"{r['rate']:.0%}"]
        assert row.split() == ["coupled", "chain:4", *numbers, str(r["rounds"])]


def test_acceptance_table_marks_the_typical_rule_as_lossy() -> None:
    case = acceptance.AcceptanceCase("typical", Tree.chain(1))
    assert "typical (lossy)" in table_of([MeasuredAcceptance(case, 1.0, 2.5, 0.1, 0.5, 10)])


def test_acceptance_draft_quantize_option_reaches_head_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, quantize: str | None, **__: object) -> None:
        raise InterruptedError(quantize)

    monkeypatch.setattr(pair.auto, "load_drafter", load)
    source = BenchPair(TARGET, None, (), "head", None)
    for kind in (None, "int8"):
        with pytest.raises(InterruptedError, match=str(kind)):
            next(acceptance.measure(source, *acceptance.cases(["coupled"], [Tree.chain(4)], kind)))


def test_draft_option_dflash_names_the_embedded_dflash_head_and_no_option_the_eagle3_head() -> None:
    for words, kind in (([], Eagle3), (["--draft", "dflash"], DFlash)):
        found = BenchPair.of(make_parser().parse_args(["bench", "acceptance", *words]))
        assert type(found.drafter(TREE)) is kind and found.target.config.vocab_size == 2048


@pytest.mark.long
def test_acceptance_by_rule_measures_the_target_and_the_drafter_that_the_options_name(
    capsys: pytest.CaptureFixture,
) -> None:
    """The embedded target drafts for itself, so each step at temperature 0 emits the whole chain and a token."""
    target = str(demo.TARGET)
    words = ["--target", target, "--draft", target, "--accept", "coupled", "--tree", "chain:3", "--temperature", "0"]
    assert main(["bench", "acceptance", *words, "--tokens", "9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3] == "4.00"


TARGET, TREE = tiny.model(16, layers=1), Tree.chain(2)
IDS = np.random.default_rng(0).integers(0, 16, 60).tolist()


def test_acceptance_prompts_of_all_context_lengths_end_at_equal_text_positions() -> None:
    found = text_places(range(100), (5, 20, 50), 4)
    assert {size: {len(text) for text in own} for size, own in found.items()} == {5: {5}, 20: {20}, 50: {50}}
    for short, long in zip(found[5], found[50], strict=True):
        assert long[-5:] == short and long == list(range(long[0], long[0] + 50))
    assert found[50][0][0] == 0 and found[50][-1][-1] == 99 and len({text[-1] for text in found[50]}) == 4


@pytest.mark.parametrize(("context", "places", "least"), [(8, 1, 8), (99, 4, 102)])
def test_acceptance_context_prompts_of_wrong_sizes_raise(context: int, places: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"expected at least 2 places and a text of {least} tokens, got {places} and"):
        text_places(range(100), (context,), places)


def test_acceptance_with_a_window_and_a_drafter_without_window_support_raises() -> None:
    with pytest.raises(ValueError, match="expected a drafter with a window"):
        next(
            acceptance.measure(
                BenchPair(TARGET, None, (), "ngram", None), AcceptanceCase("coupled", TREE, draft_window=8)
            )
        )


@pytest.mark.long
def test_draft_window_shorter_than_the_context_lowers_acceptance_by_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself, so all drafts are accepted unless a window hides part of the context."""
    monkeypatch.setattr(BenchPair, "drafter", lambda *_: DraftModel(TARGET, TREE))
    source, texts = BenchPair(TARGET, None, (), None, None), text_places(IDS, (3, 40), 3)
    settings = acceptance.cases(["coupled"], [TREE], windows=(None, 4))
    results = [one for case in settings for one in acceptance.measure(source, case, (0.0,), texts, tokens=10)]
    keys = [(one.case.draft_window, one.case.context) for one in results]
    assert keys == [(None, 3), (None, 40), (4, 3), (4, 40)]
    for one in results:
        assert 3 * 9 <= round(one.rounds * one.length) <= 3 * 10
    lengths = dict(zip(keys, [one.length for one in results], strict=True))
    assert lengths[None, 3] == lengths[None, 40] == 3
    assert lengths[4, 40] < 3


def test_acceptance_command_with_context_lengths_prints_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def measure(
        source: BenchPair, case: AcceptanceCase, heats: Any, texts: Any, **sizes: Any
    ) -> list[MeasuredAcceptance]:
        asked.append(({size: len(places) for size, places in texts.items()}, heats, sizes["tokens"]))
        return [MeasuredAcceptance(replace(case, context=size), 0.0, 1 + size / 1000, 0.25, 0.5, 7) for size in texts]

    monkeypatch.setattr(acceptance, "measure", measure)
    words = ["--context", "256", "512", "--draft-window", "none", "64", "--accept", "coupled", "--temperature", "0"]
    files = ["--tree", "chain:2", "--tokens", "9", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "acceptance", *words, *files]) == 0
    assert asked == [({256: SAMPLED, 512: SAMPLED}, [0.0], 9)] * 2
    _, heading, _, none, _, window, _ = capsys.readouterr().out.splitlines()
    assert heading.split()[2:5] == ["tree", "window", "context"]
    assert none.split() == ["coupled", "chain:2", "256", "0", "1.26", "0.25", "50%", "7"]
    assert window.split()[:4] == ["coupled", "chain:2", "64", "256"]
    results = [one["case"] for one in json.loads((tmp_path / "out.json").read_text())["results"]]
    assert [(r["draft_window"], r["context"]) for r in results] == [(None, 256), (None, 512), (64, 256), (64, 512)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "some.txt"], "--text: expected none without --context"),
        (["--join", "beside"], "--join: expected --lookup"),
    ],
)
def test_acceptance_command_with_an_option_but_not_the_one_that_it_needs_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "acceptance", *words]) == 2
    assert message in capsys.readouterr().err


def test_names_demo_stand_for_the_embedded_target_and_head_and_suffix_cannot_be_quantised() -> None:
    found = BenchPair.of(make_parser().parse_args(["bench", "acceptance", "--target", "demo", "--draft", "demo"]))
    assert type(found.drafter(TREE)) is Eagle3 and found.target.config.vocab_size == 2048
    with pytest.raises(ValueError, match="--draft-quantize: expected none with --draft suffix, got int8"):
        BenchPair(TARGET, None, (), "suffix", None).drafter(TREE, "int8")


def test_drafter_that_is_quantised_at_load_has_int8_weights() -> None:
    found: Any = load_drafter(demo.HEAD, TREE, quantize="int8")
    assert any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(found.head))
    whole: Any = load_drafter(demo.HEAD, TREE)
    assert all(leaf.dtype != jnp.int8 for leaf in jax.tree.leaves(whole.head)), "control: int8 is what was asked for"
