"""`jspec bench serve --measure depths` and `--measure batching`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.engine.metrics import Metrics
from jspec.engine.tokenizer import ByteTokenizer
from jspec.tools import demo
from jspec.tools.bench import serve_variants
from jspec.tools.bench.pair import Pair
from jspec.tools.bench.report import table_of
from jspec.tools.bench.serve_variants import Speed, measure_batching
from tests.support import tiny

pytestmark = pytest.mark.once

TOKENS = 12
VARIANTS = ["one by one", "all at once", "all at once, no overlap"]


@pytest.mark.long
def test_depths_every_variant_decodes_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--batch", "1", "--tree", "chain:1", "--output-len", str(TOKENS), "--repeats", "2"]
    out = tmp_path / "out.json"
    assert main(["bench", "serve", "--measure", "depths", *options, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    by_name = {result["variant"]: result for result in written["results"]}
    assert list(by_name) == ["plain", "depth 0", "depth 1", "adaptive"]
    assert written["environment"]["platform"] == "cpu"
    for result in by_name.values():
        assert result["tokens_per_second"] > 0 and result["spread"] >= 0
        tokens = result["length"] * sum(result["rounds_at"].values())
        # A row's first token belongs to no step; a last step that is cut after a drafted token counts a bonus too.
        assert 2 * (TOKENS - 1) - 0.01 < tokens < 2 * (TOKENS - 1) + 2.01
    assert by_name["plain"]["length"] == by_name["depth 0"]["length"] == 1 < by_name["depth 1"]["length"]
    assert set(by_name["depth 1"]["rounds_at"]) == {"1"} and set(by_name["adaptive"]["rounds_at"]) <= {"0", "1"}
    about, heading, _, plain, *_ = capsys.readouterr().out.splitlines()
    assert about.startswith("plain, fixed and adaptive drafting of chain:1")
    assert heading.split()[:3] == ["batch", "variant", "tokens/s"]
    assert plain.split()[:3] == ["1", "plain", f"{by_name['plain']['tokens_per_second']:.1f}"]


def test_speeds_variants_are_compared_with_the_first() -> None:
    counts = [
        Metrics(num_drafts=4, num_accepted_tokens=accepted, num_rounds_per_depth={4: 3, 0: 1}) for accepted in (0, 5)
    ]
    first, second = iter([9.0, 10.0, 20.0, 30.0]), iter([9.0, 15.0, 40.0, 30.0])
    variants = {"plain": lambda: (next(first), counts[0]), "adaptive": lambda: (next(second), counts[1])}
    plain, adaptive = serve_variants.speeds(8, variants, 3)
    assert (plain.tokens_per_second, plain.spread, plain.ratio, plain.length) == (20.0, 20.0, 1.0, 1.0)
    assert (adaptive.tokens_per_second, adaptive.spread, adaptive.ratio, adaptive.length) == (30.0, 25.0, 1.5, 2.25)
    last = table_of(serve_variants.COLUMNS, [plain, adaptive]).splitlines()[-1]
    assert last.split() == ["8", "adaptive", "30.0", "25.0", "1.500", "2.25", "0:", "25%,", "4:", "75%"]


@pytest.mark.parametrize("words", ["--batch 0", "--output-len 1"])
def test_depths_wrong_sizes_are_refused(words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "serve", "--measure", "depths", "--tree", "chain:1", *words.split()]) == 2
    assert "depths: expected batches >= 1 and at least 2 output tokens" in capsys.readouterr().err


def test_batching_variants_are_compared_with_one_by_one() -> None:
    pair = Pair(tiny.model(256, layers=1), ByteTokenizer(), (), None, None)
    results = measure_batching(pair, None, 2, tokens=3, repeats=1)
    assert [one.variant for one in results] == VARIANTS and results[0].ratio == 1.0
    assert results[1].ratio == pytest.approx(results[1].tokens_per_second / results[0].tokens_per_second)
    with pytest.raises(ValueError, match="requests: expected at least 2"):
        measure_batching(pair, None, 1, tokens=3, repeats=1)


@pytest.mark.timing
@pytest.mark.parametrize("tree", [None, Tree.chain(3)], ids=str)
def test_batching_is_three_times_as_fast_and_overlap_no_slower(tree: Tree | None) -> None:
    results: list[Speed] = measure_batching(Pair.load(demo.TARGET), tree, 64, tokens=64, repeats=5)
    print(table_of(serve_variants.COLUMNS, results))
    assert results[1].ratio >= 3.0
    assert results[1].ratio / results[2].ratio >= 0.98  # as fast, but for the difference of two medians
