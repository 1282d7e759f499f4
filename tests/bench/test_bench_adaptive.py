"""`jspec bench adaptive`: what it runs, what it prints, what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jspec.__main__ import main
from jspec.tools.bench import adaptive
from jspec.tools.bench.adaptive import Speed

pytestmark = pytest.mark.once

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small run left what it printed and its results."""
    folder = tmp_path_factory.mktemp("adaptive")
    options = ["--batch", "1", "--tree", "chain:1", "--tokens", str(TOKENS), "--repeats", "2"]
    with pytest.MonkeyPatch.context() as patch, open(folder / "printed.txt", "w") as printed:
        patch.setattr("sys.stdout", printed)
        assert main(["bench", "adaptive", *options, "--json", str(folder / "results.json")]) == 0
    return folder


@pytest.mark.long
def test_every_way_decodes_the_same_tokens(folder: Path) -> None:
    written = json.loads((folder / "results.json").read_text())
    by_way = {result["way"]: result for result in written["results"]}
    assert list(by_way) == ["plain", "depth 0", "depth 1", "adaptive"]
    assert written["case"]["tree"] == "chain:1" and written["environment"]["platform"] == "cpu"
    for result in by_way.values():
        assert result["tokens_per_second"] > 0 and result["spread"] >= 0
        tokens = result["length"] * sum(result["rounds_at"].values())
        # A row's first token belongs to no round; a last round that is cut behind a drafted token counts a bonus too.
        assert 2 * (TOKENS - 1) - 0.01 < tokens < 2 * (TOKENS - 1) + 2.01
    assert by_way["plain"]["length"] == by_way["depth 0"]["length"] == 1 < by_way["depth 1"]["length"]
    assert set(by_way["depth 1"]["rounds_at"]) == {"1"} and set(by_way["adaptive"]["rounds_at"]) <= {"0", "1"}


@pytest.mark.long
def test_the_table_has_the_results(folder: Path) -> None:
    about, heading, _, row = (folder / "printed.txt").read_text().splitlines()
    results = json.loads((folder / "results.json").read_text())["results"]
    plain, others = results[0]["tokens_per_second"], [result["ratio"] for result in results[1:]]
    assert about.startswith("chain:1 against plain decoding")
    assert heading.split()[:1] == ["batch"] and "adaptive" in heading
    assert row.split()[:5] == ["1", f"{plain:.0f}", *(f"{ratio:.2f}" for ratio in others)]


def test_one_line_a_batch_with_the_shares_of_the_depths() -> None:
    results = [
        Speed(way, batch, speed, 0.0, speed / (100.0 * batch), length, rounds_at)
        for batch in (1, 64)
        for way, speed, length, rounds_at in (
            ("plain", 100.0 * batch, 1.0, {0: 10}),
            ("depth 4", 150.0, 2.5, {4: 10}),
            ("adaptive", 160.0 * batch, 2.25, {4: 3, 0: 1}),
        )
    ]
    *_, one, many = adaptive.text(results).splitlines()
    assert one.split() == ["1", "100", "1.50", "1.60", "2.25", "0:", "25%,", "4:", "75%"]
    assert many.split()[:4] == ["64", "6400", "0.02", "1.60"]


@pytest.mark.parametrize("words", ["--batch 0", "--tokens 1"])
def test_a_mistake_is_one_line_before_anything_is_measured(words: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "adaptive", *words.split()]) == 2
    assert "adaptive: expected batches >= 1 and tokens >= 2" in capsys.readouterr().err
