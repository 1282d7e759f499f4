"""`jspec bench throughput --rival`: ratios and best drafts by hand, points of one side, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.tools.bench import compare
from jspec.tools.bench.compare import Point

pytestmark = pytest.mark.once

RATES = (0.5, 0.25)  # lengths 1, 1.5, 1.75
PLAIN, CHAIN1, CHAIN2 = (
    Point("", 128, 8, mode, d) for mode, d in (("none", "none"), ("eagle3", "chain:1"), ("eagle3", "chain:2"))
)
RIVAL = {PLAIN: 4.0, CHAIN1: 5.0, CHAIN2: 7.5}
OURS = {PLAIN: (3.0, 2.0), CHAIN1: (5.0, 2.5), CHAIN2: (5.0, 3.0)}


def rival_line(**changed: Any) -> str:
    line = {"mode": "eagle3", "quant": "", "k": 2, "batch": 8, "inlen": 128, "step_ms": 7.5, "tok_s": 1}
    return json.dumps({name: value for name, value in (line | changed).items() if value is not None})


def our_result(tree: str = "chain:2", milliseconds: float = 5.0, **changed: Any) -> dict[str, Any]:
    case = {"shape": "tiny", "dtype": "bfloat16", "batch": 8, "context": 128, "tree": tree, "page_size": 16}
    return {"case": case | changed, "milliseconds": milliseconds, "floor": 3.0}


def write(folder: Path, rival: list[str], ours: list[dict[str, Any]]) -> tuple[str, str]:
    (folder / "rival.jsonl").write_text("\n".join(rival) + "\n")
    (folder / "ours.json").write_text(json.dumps({"environment": {"device": "a device"}, "results": ours}))
    return str(folder / "rival.jsonl"), str(folder / "ours.json")


def test_rows_ratios_and_tokens_by_hand() -> None:
    rows = compare.rows(RIVAL, OURS, RATES)
    assert [row.point for row in rows] == [PLAIN, CHAIN1, CHAIN2]
    assert [row.ratio for row in rows] == pytest.approx([3 / 4, 1, 2 / 3])
    assert [row.floor for row in rows] == [2.0, 2.5, 3.0]
    assert [row.rival_tokens for row in rows] == pytest.approx([8 * 1 / 0.004, 8 * 1.5 / 0.005, 8 * 1.75 / 0.0075])
    assert [row.our_tokens for row in rows] == pytest.approx([8 * 1 / 0.003, 8 * 1.5 / 0.005, 8 * 1.75 / 0.005])


def test_rows_best_draft_of_each_side_is_marked() -> None:
    """The rival's is k = 1 (2400 tokens/s), ours k = 2 (2800)."""
    rows = compare.rows(RIVAL, OURS, RATES)
    assert [row.best for row in rows] == ["", "rival", "ours"]
    assert [row.gain for row in rows] == [None, None, pytest.approx(2800 / 2400)]
    (both,) = compare.rows({CHAIN1: 5.0}, {CHAIN1: (4.0, 3.0)}, RATES)
    assert both.best == "rival, ours" and both.gain == pytest.approx(5 / 4)


def test_rows_other_batch_or_quantisation_does_not_compete() -> None:
    other = {point._replace(batch=64): 3 * ms for point, ms in RIVAL.items()}
    fp8 = {point._replace(quant="fp8"): ms / 2 for point, ms in RIVAL.items()}
    best = [row for row in compare.rows(RIVAL | other | fp8, OURS, RATES) if row.best]
    assert [(row.point.quant, row.point.batch, row.point.k, row.best) for row in best] == [
        ("", 8, 1, "rival"),
        ("", 8, 2, "ours"),
        ("", 64, 1, "rival"),
        ("fp8", 8, 1, "rival"),
    ]
    assert [row.rival_tokens for row in best[2:]] == pytest.approx([6400, 4800])


def test_rows_point_of_one_side_has_no_ratio() -> None:
    dynamic = Point("", 128, 8, "eagle3", "topk:60,8,10")
    rows = compare.rows({PLAIN: 4.0, CHAIN1: 5.0}, {PLAIN: (3.0, 2.0), dynamic: (6.0, 5.0)}, RATES)
    assert [(row.point, row.rival, row.ours) for row in rows[1:]] == [(CHAIN1, 5.0, None), (dynamic, None, 6.0)]
    assert [row.ratio for row in rows[1:]] == [None, None]
    assert rows[2].our_tokens is None  # no acceptance is stated for such a tree


def test_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    rival = [rival_line(mode="none", k=0, step_ms=4.0), rival_line(k=1, step_ms=5), rival_line(quant="fp8")]
    ours = [our_result("none", 3.0), our_result("chain:1"), our_result("chain:2", quantize=None)]
    paths = write(tmp_path, rival, ours)
    outputs = ["--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg")]
    words = ["--rival", paths[0], "--ours", paths[1], "--positions", ".5,.25", *outputs]
    assert main(["bench", "throughput", *words]) == 0
    _, heading, _, *rows, last = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["quant", "context", "batch", "mode", "draft"]
    assert rows[0].split() == ["none", "128", "8", "none", "none", "4.000", "3.000", "3.000", "0.75", "2000", "2667"]
    assert rows[1].split()[:8] == ["none", "128", "8", "eagle3", "chain:1", "5.000", "5.000", "3.000"]
    assert rows[3].split() == ["fp8", "128", "8", "eagle3", "chain:2", "7.500", "1867", "rival"]
    assert last.startswith("tokens/s from STATED")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["ours"]["device"] == "a device" and content["stated_rates"] == [0.5, 0.25]
    assert [point["ratio"] for point in content["results"]] == [0.75, 1.0, None, None]
    assert content["results"][0]["point"]["draft"] == "none"
    assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "TypeError"),
        (rival_line(step_ms="7"), "(128, 8, '7'), which must be above 0"),
        (rival_line(step_ms=0), "(128, 8, 0), which must be above 0"),
        (rival_line(step_ms=float("nan")), "(128, 8, nan), which must be above 0"),
        (rival_line(batch=0), "(128, 0, 7.5), which must be above 0"),
        (rival_line(k=-1), "got -1"),
        (rival_line(k=1.5), "k 1.5"),
        (rival_line(k=True), "k True"),
        (rival_line(quant=3), "quant 3"),
        (rival_line(quant=None), "KeyError('quant')"),
        (rival_line(k=0), "mode 'eagle3', quant '' and k 0"),
        (rival_line(mode="none"), "mode 'none', quant '' and k 2"),
        (rival_line(k=999), "expected at most 256 nodes"),
        (rival_line(k=1), "twice"),
    ],
)
def test_read_rival_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, [rival_line(k=1), "", line], [])
    with pytest.raises(ValueError, match="line 3: ") as error:
        compare.read_rival(Path(path))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected results as"),
        ({"results": []}, "expected results of one shape"),
        ({"results": [our_result("chain:2", batch=None)]}, "(128, None, 5.0, 3.0), which must be above 0"),
        ({"results": [our_result(), our_result()]}, "twice"),
        ({"results": [our_result(), our_result(batch=1, dtype="float32")]}, "expected results of one shape, dtype"),
        ({"results": [our_result(milliseconds=-1.0)]}, "(128, 8, -1.0, 3.0), which must be above 0"),
        ({"results": [3]}, "expected results as"),
    ],
)
def test_read_ours_wrong_file_is_named(ours: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(ours if isinstance(ours, str) else json.dumps(ours))
    with pytest.raises(ValueError, match=r"ours\.json: ") as error:
        compare.read_ours(path)
    assert message in str(error.value)


def test_command_without_lines_or_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, ours = write(tmp_path, ["", " "], [our_result()])
    assert main(["bench", "throughput", "--rival", path, "--ours", ours]) == 2
    assert "expected a line of JSON for each point, got none" in capsys.readouterr().err
    assert main(["bench", "throughput", "--rival", path]) == 2
    assert "expected --ours with --rival" in capsys.readouterr().err
