"""`jspec bench throughput --rival`: ratios and tokens by hand, points of one side, and wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.tools.bench import throughput

pytestmark = pytest.mark.once


def rival_line(**changed: Any) -> str:
    line = {"mode": "eagle3", "quant": "", "k": 2, "batch": 8, "inlen": 128, "step_ms": 7.5, "tok_s": 1}
    return json.dumps({name: value for name, value in (line | changed).items() if value is not None})


def our_result(tree: str = "chain:2", milliseconds: float = 5.0, **changed: Any) -> dict[str, Any]:
    case = {"shape": "tiny", "dtype": "bfloat16", "batch": 8, "context": 128, "tree": tree, "quantize": None}
    return {"case": case | changed, "milliseconds": milliseconds, "floor": 3.0}


def write(folder: Path, rival: list[str], ours: list[dict[str, Any]]) -> tuple[str, str]:
    (folder / "rival.jsonl").write_text("\n".join(rival) + "\n")
    (folder / "ours.json").write_text(json.dumps({"environment": {}, "results": ours}))
    return str(folder / "rival.jsonl"), str(folder / "ours.json")


def test_command_ratios_and_tokens_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Chains of 0, 1, 2 emit 1, 1.5, 1.75 tokens a step. The rival's best is k = 1 (2400 tokens/s), ours 2 (2800)."""
    rival = [rival_line(mode="none", k=0, step_ms=4.0), rival_line(k=1, step_ms=5), rival_line()]
    rival.append(rival_line(quant="fp8"))
    ours = [our_result("none", 3.0), our_result("chain:1"), our_result(), our_result("topk:60,8,10", 6.0)]
    words = [word for pair in zip(("--rival", "--ours"), write(tmp_path, rival, ours), strict=True) for word in pair]
    out = tmp_path / "out.json"
    assert main(["bench", "throughput", *words, "--positions", ".5,.25", "--json", str(out)]) == 0
    _, heading, _, *rows, gain, last = capsys.readouterr().out.splitlines()[:-1]
    assert heading.split()[:4] == ["quant", "context", "batch", "draft"]
    content = json.loads(out.read_text())["results"]
    found = {(one["quant"], one["draft"]): one for one in content}
    assert list(found) == [("fp8", "chain:2"), *(("none", d) for d in ("chain:1", "chain:2", "none", "topk:60,8,10"))]
    chains = [found["none", draft] for draft in ("none", "chain:1", "chain:2")]
    assert [one["ratio"] for one in chains] == pytest.approx([3 / 4, 1, 2 / 3])
    assert [one["rival_tokens"] for one in chains] == pytest.approx([8 / 0.004, 8 * 1.5 / 0.005, 8 * 1.75 / 0.0075])
    assert [one["our_tokens"] for one in chains] == pytest.approx([8 / 0.003, 8 * 1.5 / 0.005, 8 * 1.75 / 0.005])
    one_sided = found["fp8", "chain:2"], found["none", "topk:60,8,10"]  # no acceptance is stated for such a tree
    assert [(one["ratio"], one["our_tokens"]) for one in one_sided] == [(None, None)] * 2
    assert (one_sided[0]["ours"], one_sided[1]["rival"], one_sided[1]["floor"]) == (None, None, 3.0)
    assert rows[3].split() == ["none", "128", "8", "none", "4.000", "3.000", "3.000", "0.75", "2000", "2667"]
    assert (gain, last) == tuple(
        f"best draft, {at}, 128, 8: {gain} times the rival's" for at, gain in (("fp8", "0.00"), ("none", "1.17"))
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "TypeError"),
        (rival_line(step_ms="7"), "TypeError"),
        (rival_line(step_ms=0), "not above 0"),
        (rival_line(step_ms=float("nan")), "not above 0"),
        (rival_line(batch=0), "not above 0"),
        (rival_line(k=-1), "got -1"),
        (rival_line(k=1.5), "got 1.5"),
        (rival_line(quant=None), "KeyError('quant')"),
        (rival_line(k=0), "k 0 with mode eagle3"),
        (rival_line(mode="none"), "k 2 with mode none"),
        (rival_line(k=999), "expected at most 256 nodes"),
        (rival_line(k=1), "twice"),
    ],
)
def test_read_rival_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, [rival_line(k=1), "", line], [])
    with pytest.raises(ValueError, match=r"rival.jsonl: expected lines, each an object") as error:
        throughput.read_times(Path(path), is_rival=True)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ("{", "Expecting property name"),
        ({"results": []}, "no point"),
        ({"results": [our_result(batch=None)]}, "TypeError"),
        ({"results": [our_result(), our_result()]}, "twice"),
        ({"results": [our_result(), our_result(batch=1, dtype="float32")]}, "float32"),
        ({"results": [our_result(milliseconds=-1.0)]}, "not above 0"),
        ({"results": [3]}, "TypeError"),
    ],
)
def test_read_ours_wrong_file_is_named(ours: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(ours if isinstance(ours, str) else json.dumps(ours))
    with pytest.raises(ValueError, match=r"ours\.json: expected what") as error:
        throughput.read_times(path, is_rival=False)
    assert message in str(error.value)


def test_command_without_lines_or_ours_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, ours = write(tmp_path, ["", " "], [our_result()])
    for words, message in (["--ours", ours], "no point"), ([], "expected --ours with --rival"):
        assert main(["bench", "throughput", "--rival", path, *words]) == 2
        assert message in capsys.readouterr().err
