"""`jspec bench compare`: ratios and best drafts by hand, what one side lacks, and files that are not understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.tools.bench import compare
from jspec.tools.bench.compare import Own, Point

pytestmark = pytest.mark.once

RATES = (0.5, 0.25)  # lengths 1, 1.5, 1.75
PLAIN, CHAIN1, CHAIN2 = (
    Point("", 128, 8, mode, d) for mode, d in (("none", "none"), ("eagle3", "chain:1"), ("eagle3", "chain:2"))
)
RIVAL = {PLAIN: 4.0, CHAIN1: 5.0, CHAIN2: 7.5}
OURS = {PLAIN: Own(3.0, 2.0), CHAIN1: Own(5.0, 2.5), CHAIN2: Own(5.0, 3.0)}


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


def test_ratios_and_tokens_by_hand() -> None:
    rows = compare.rows(RIVAL, OURS, RATES)
    assert [row.point for row in rows] == [PLAIN, CHAIN1, CHAIN2]
    assert [row.ratio for row in rows] == pytest.approx([3 / 4, 1, 2 / 3])
    assert [row.floor for row in rows] == [2.0, 2.5, 3.0]
    assert [row.rival_tokens for row in rows] == pytest.approx([8 * 1 / 0.004, 8 * 1.5 / 0.005, 8 * 1.75 / 0.0075])
    assert [row.our_tokens for row in rows] == pytest.approx([8 * 1 / 0.003, 8 * 1.5 / 0.005, 8 * 1.75 / 0.005])


def test_the_best_draft_of_each_side() -> None:
    """The rival's is k = 1 (2400 tokens/s), ours k = 2 (2800)."""
    (best,) = compare.best(compare.rows(RIVAL, OURS, RATES))
    assert (best.quant, best.context, best.batch) == ("", 128, 8)
    assert best.rival == (1, pytest.approx(2400)) and best.ours == (2, pytest.approx(2800))
    assert best.rival_tried == best.ours_tried == (0, 1, 2)
    assert best.gain == pytest.approx(2800 / 2400)


def test_places_do_not_compete() -> None:
    other = {point._replace(batch=64): 3 * ms for point, ms in RIVAL.items()}
    fp8 = {point._replace(quant="fp8"): ms / 2 for point, ms in RIVAL.items()}
    best = compare.best(compare.rows(RIVAL | other | fp8, OURS, RATES))
    assert [(one.quant, one.batch) for one in best] == [("", 8), ("", 64), ("fp8", 8)]
    assert [one.ours is None for one in best] == [False, True, True]
    assert [one.rival for one in best[1:]] == [(1, pytest.approx(6400)), (1, pytest.approx(4800))]


def test_what_one_side_lacks_is_shown_as_such() -> None:
    dynamic = Point("", 128, 8, "eagle3", "topk:60,8,10")
    rows = compare.rows({PLAIN: 4.0, CHAIN1: 5.0}, {PLAIN: Own(3.0, 2.0), dynamic: Own(6.0, 5.0)}, RATES)
    assert [(row.point, row.note) for row in rows] == [(PLAIN, ""), (CHAIN1, "only rival"), (dynamic, "only ours")]
    assert [row.ratio for row in rows[1:]] == [None, None]
    lines = compare.text(rows, RATES).splitlines()
    assert lines[3].split()[-5:] == ["-", "2400", "-", "only", "rival"]
    assert lines[4].split()[3:] == ["eagle3", "topk:60,8,10", "-", "6.000", "5.000", "-", "-", "-", "only", "ours"]
    assert lines[-1] == "no acceptance stated, so no tokens/s: topk:60,8,10"


def test_a_draft_longer_than_what_is_stated_has_no_tokens() -> None:
    rows = compare.rows(RIVAL, OURS, RATES[:1])
    assert [row.rival_tokens is None for row in rows] == [False, False, True]
    assert compare.best(rows)[0].ours == (0, pytest.approx(8 / 0.003))


def test_the_command_reads_both_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rival = [rival_line(mode="none", k=0, step_ms=4.0), "", rival_line(k=1, step_ms=5), rival_line(quant="fp8")]
    files = write(tmp_path, rival, [our_result("none", 3.0), our_result("chain:1")])
    options = ["--positions", ".5,.25", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "compare", files[0], "--ours", files[1], *options]) == 0
    about, heading, _, *rows = capsys.readouterr().out.splitlines()
    assert "a device" in about and "bfloat16" in about
    assert heading.split()[:6] == ["quant", "context", "batch", "mode", "k", "rival"]
    assert rows[0].split() == ["none", "128", "8", "none", "0", "4.000", "3.000", "3.000", "0.75", "2000", "2667"]
    assert rows[1].split() == ["none", "128", "8", "eagle3", "1", "5.000", "5.000", "3.000", "1.00", "2400", "2400"]
    assert rows[2].split() == ["fp8", "128", "8", "eagle3", "2", "7.500", "-", "-", "-", "1867", "-", "only", "rival"]
    assert rows[4].startswith("tokens/s from STATED mean acceptance lengths")
    assert rows[7].split() == ["none", "128", "8", "1", "0,1", "2400", "0", "0,1", "2667", "1.11"]
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["ours"]["device"] == "a device" and content["stated_rates"] == [0.5, 0.25]
    assert [point["ratio"] for point in content["points"]] == [0.75, 1.0, None]
    assert content["best"][0]["ours"] == [0, pytest.approx(8000 / 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected JSON, got '{'"),
        ("[1]", "expected an object with mode, a text"),
        (rival_line(step_ms=None), "step_ms, a number above 0, got None"),
        (rival_line(step_ms="7"), "step_ms, a number above 0, got '7'"),
        (rival_line(step_ms=0), "step_ms, a number above 0, got 0"),
        (rival_line(step_ms=float("nan")), "step_ms, a number above 0, got nan"),
        (rival_line(k=-1), "k, a whole number, got -1"),
        (rival_line(k=1.5), "k, a whole number, got 1.5"),
        (rival_line(k=True), "k, a whole number, got True"),
        (rival_line(batch=-1), "batch, a whole number above 0, got -1"),
        (rival_line(batch=0), "batch, a whole number above 0, got 0"),
        (rival_line(quant=None), "quant, a text, got None"),
        (rival_line(k=0), 'expected k 0 with mode "none" and only there'),
        (rival_line(mode="none"), 'expected k 0 with mode "none" and only there'),
        (rival_line(k=999), "expected at most 256 nodes"),
        (rival_line(k=1), "expected each point once"),
    ],
)
def test_a_line_that_is_not_understood_is_named(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, _ = write(tmp_path, [rival_line(k=1), "", line], [])
    assert main(["bench", "compare", path, "--shape", "tiny"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jspec: {path}, line 3: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ("{", "ours.json, line 1: expected JSON"),
        ("[]", "expected environment and results"),
        ({"results": []}, "expected results of one shape"),
        ({"results": [our_result("chain:x")]}, "result 1: tree: expected"),
        ({"results": [our_result(), our_result(batch=None)]}, "result 2: expected an object with batch"),
        ({"results": [our_result(), our_result()]}, "result 2: expected each point once"),
        ({"results": [our_result(), our_result(batch=1, dtype="float32")]}, "expected results of one shape, dtype"),
        ({"results": [our_result(milliseconds=-1.0)]}, "result 1: expected an object with milliseconds"),
        ({"results": [3]}, "result 1: expected an object with tree"),
        ({"results": [{"case": 3}]}, "result 1: expected an object with tree"),
    ],
)
def test_results_that_are_not_understood_are_named(
    ours: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    files = write(tmp_path, [rival_line()], [])
    Path(files[1]).write_text(ours if isinstance(ours, str) else json.dumps(ours))
    assert main(["bench", "compare", files[0], "--ours", files[1]]) == 2
    error = capsys.readouterr().err
    assert message in error and "ours.json" in error and error.count("\n") == 1


def test_a_file_without_a_point_and_options_without_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, ours = write(tmp_path, ["", " "], [our_result()])
    assert main(["bench", "compare", path, "--ours", ours]) == 2
    assert "expected a line of JSON for each point, got none" in capsys.readouterr().err
    path, ours = write(tmp_path, [rival_line(quant="fp8"), rival_line(mode="medusa")], [our_result()])
    assert main(["bench", "compare", path, "--shape", "tiny"]) == 2
    assert "expected a point that can be measured" in capsys.readouterr().err
    assert main(["bench", "compare", path, "--ours", ours, "--shape", "tiny"]) == 2
    assert "only without --ours" in capsys.readouterr().err


def test_without_our_file_the_rivals_points_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rival = [rival_line(mode="none", k=0, batch=1, inlen=16), rival_line(quant="fp8")]
    path, _ = write(tmp_path, rival, [])
    assert main(["bench", "compare", path, "--shape", "tiny", "--dtype", "float32"]) == 0
    _, _, _, measured, missing, *_ = capsys.readouterr().out.splitlines()
    assert measured.split()[:6] == ["none", "16", "1", "none", "0", "7.500"]
    assert float(measured.split()[6]) > 0 and missing.endswith("only rival")
