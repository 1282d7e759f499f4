"""`jspec bench report`: its figures against arithmetic on the engines' logs, its files, and tokens that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.tools import demo, plot, report_figure
from jspec.tools.bench import options, report, report_files
from jspec.tools.bench.load import Log
from jspec.tools.bench.report import Comparison, requests_of

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.once

WORDS = ["bench", "report", "--target", "demo", "--head", "demo", "--num-prompts", "3", "--batch", "2,1,2"]
WORDS += ["--tokens", "6", "--repeats", "2", "--tree", "chain:2"]
WIDTH = 512  # channels of the demo's widened feed-forwards here
CASES = [("sample", temperature, batch) for temperature in (0.0, 1.0) for batch in (1, 2)]


class Made(NamedTuple):
    """One run of the command."""

    folder: Path
    rows: list[Comparison]
    calls: list[Any]  # arguments of `compare` for each row
    printed: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, rows, calls = tmp_path_factory.mktemp("report"), list[Comparison](), list[Any]()

    def compare(*arguments: Any) -> Comparison:
        calls.append(arguments)
        rows.append(compute(*arguments))
        return rows[-1]

    compute: Callable[..., Comparison] = report.compare
    with pytest.MonkeyPatch.context() as patch, open(folder / "printed.txt", "w") as printed:
        patch.setattr(report, "compare", compare)
        patch.setattr(demo, "WIDTH", WIDTH)
        patch.setattr("sys.stdout", printed)
        assert main([*WORDS, "--out", str(folder)]) == 0
    return Made(folder, rows, calls, (folder / "printed.txt").read_text())


def test_report_defaults_in_the_help_are_those_of_other_targets_and_of_the_demo() -> None:
    texts = {flags[0][2:]: settings["help"] for flags, settings in options.REPORT}
    for name, demos in options.DEMO_REPORT.items():
        others = options.REPORT_DEFAULTS[name]
        shown = [",".join(map(str, one)) if isinstance(one, list) else str(one) for one in (others, demos)]
        shown[0] = "the first three" if name == "prompts" else shown[0]
        assert texts[name].endswith(f"default: {shown[0]}, demo: {shown[1]}")
    assert texts["prompts"].startswith("mt-bench, gsm8k, humaneval, sample")


def test_report_requests_are_whole_sets_with_different_seeds_that_fill_the_batch_twice() -> None:
    for batch, times in ((1, 1), (2, 2), (3, 2), (4, 3)):
        requests = requests_of([[1], [2], [3]], batch, 0.5, 9, 40)
        assert [one.prompt for one in requests] == [[1], [2], [3]] * times
        assert [one.params.seed for one in requests] == list(range(40, 40 + 3 * times))
        assert {(one.at, one.params.max_tokens, one.params.temperature) for one in requests} == {(0.0, 9, 0.5)}


def test_report_rates_and_speed_ups_are_those_of_the_engines_logs(made: Made) -> None:
    """Tokens are counted in the requests; of two repeats the speed-up is the mean of both ratios."""
    assert [(row.prompts, row.temperature, row.batch) for row in made.rows] == CASES
    for row, (_, logs, *_) in zip(made.rows, made.calls, strict=True):
        rates = [[sum(len(s.request.token_ids) for s in log.served) / log.seconds for log in logs] for logs in logs]
        ratios = [drafted / plain for plain, drafted in rates]
        assert row.speed_ups == pytest.approx(ratios) and row.speed_up == pytest.approx(sum(ratios) / 2)
        assert row.plain_rate in {plain for plain, _ in rates} and row.drafted_rate in {drafted for _, drafted in rates}
        assert min(ratios) < max(ratios), "negative control: the repeats differ"
        for side, spread in enumerate(row.ttft_ms):
            firsts = [[1e3 * (s.pieces[0][0] - s.began) for s in pair[side].served] for pair in logs]
            assert any(np.isclose(np.median(one), spread.median) for one in firsts)
            assert any(np.isclose(np.quantile(one, 0.99), spread.p99) for one in firsts)


def test_report_acceptance_and_its_error_are_those_of_the_rounds_of_each_prompt(made: Made) -> None:
    """A ratio's jackknife: each prompt, with all requests that repeat it, is left out in turn."""
    for row, (_, logs, arrivals, _, prompts, _) in zip(made.rows, made.calls, strict=True):
        log = next(drafted for _, drafted in logs if drafted.output_tokens / drafted.seconds == row.drafted_rate)
        by_arrival = {id(one.arrival): one.request.metrics for one in log.served}
        counts = np.zeros((prompts, 2))
        for index, arrival in enumerate(arrivals):
            metrics = by_arrival[id(arrival)]
            counts[index % 3] += metrics.num_accepted_tokens, metrics.num_drafts
        (accepted, rounds), n = counts.sum(0), len(counts)
        left_out = [(accepted - a) / (rounds - r) for a, r in counts]
        error = np.sqrt((n - 1) / n * sum((one - np.mean(left_out)) ** 2 for one in left_out))
        assert n == 3 and row.length == pytest.approx(1 + accepted / rounds) and row.error == pytest.approx(error)
        first, second = row.figures[1]["acceptance_per_position"]  # with the tokens that the end of an answer cuts
        assert 1 >= first >= second > 0 and 1 + first + second >= row.length
        assert row.figures[0]["mean_acceptance_length"] == 1.0


def test_report_tokens_of_drafted_decoding_are_those_of_plain_decoding(made: Made) -> None:
    for row, (_, logs, *_) in zip(made.rows, made.calls, strict=True):
        answers = [{id(s.arrival): s.request.token_ids for s in log.served} for pair in logs for log in pair]
        assert all(one == answers[0] for one in answers) and (row.equal, row.tokens) == (row.requests, "all")
    sampled = [made.calls[i][1][0][1].served for i in (1, 3)]
    texts = [sorted(tuple(s.request.token_ids) for s in served) for served in sampled]
    assert texts[0] != texts[1], "negative control: temperature 1 has other tokens"


def changed(log: Log) -> Log:
    """Return a log in which one request has another last token."""
    first, *rest = log.served
    request = SimpleNamespace(metrics=first.request.metrics, token_ids=[*first.request.token_ids[:-1], -1])
    return log._replace(served=[replace(first, request=request), *rest])  # type: ignore[arg-type]


@pytest.mark.parametrize(("promises", "status"), [(True, 1), (False, 0)])
def test_report_with_one_wrong_token_says_so_and_fails_if_the_rule_promises_it(
    made: Made, promises: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    where, logs, arrivals, tree, prompts, _ = made.calls[1]
    logs = [logs[0], [logs[1][0], changed(logs[1][1])]]
    wrong = report.compare(where, logs, arrivals, tree, prompts, promises)
    monkeypatch.setattr(report, "measure", lambda *_, **__: iter([made.rows[0], wrong]))
    monkeypatch.setattr(demo, "WIDTH", WIDTH)
    assert main([*WORDS, "--out", str(tmp_path)]) == status
    text = (tmp_path / "report.md").read_text()
    assert ("| 5 OF 6 |" in text) == ("TOKENS OF DRAFTED DECODING DIFFER" in text) == promises
    assert ("| not promised |" in text) != promises
    assert ("DIFFER" in capsys.readouterr().out) == promises
    assert json.loads((tmp_path / "report.json").read_text())["results"][1]["equal"] == (5 if promises else None)


def test_report_files_have_every_figure_the_machine_and_the_command(made: Made) -> None:
    written, text = json.loads((made.folder / "report.json").read_text()), (made.folder / "report.md").read_text()
    assert [row["speed_up"] for row in written["results"]] == [row.speed_up for row in made.rows]
    assert written["command"] == " ".join(["jspec", *WORDS, "--out", str(made.folder)])
    assert written["load"]["seed"] == 0 and written["load"]["target"].startswith(
        "demo, with feed-forwards widened to 512"
    )
    assert {"jax", "jspec", "python", "device", "cores", "power_limit"} <= set(written["machine"])
    assert {"median_ttft_ms", "p99_tpot_ms", "output_throughput"} <= set(written["results"][0]["figures"][1])
    assert f"`{written['command']}`" in text and "](report.svg)" in text and written["date"] in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| sample")]
    assert [row[7] for row in rows] == [f"{row.speed_up:.2f}" for row in made.rows]
    assert [row[3] for row in rows] == [f"{row.length:.2f}" for row in made.rows]
    assert made.printed.splitlines()[-1].startswith("written: ")


def test_report_picture_has_the_same_bytes_twice_no_date_and_no_background(made: Made, tmp_path: Path) -> None:
    picture = (made.folder / "report.svg").read_bytes()
    report_figure.draw(made.rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == picture
    report_figure.draw([replace(row, speed_up=9.0) for row in made.rows], tmp_path / "other.svg")
    assert (tmp_path / "other.svg").read_bytes() != picture, "negative control"
    root = ElementTree.fromstring(picture)
    assert root.attrib["width"] == "450pt", "600 pixels"
    assert b"<dc:date>" not in picture
    fills = set(re.findall(r"fill: (#\w+)", picture.decode()))
    assert report_figure.GREY in fills and not fills & {"#ffffff", "#000000"}


def test_report_against_an_earlier_one_of_the_same_load_says_what_changed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    faster = [replace(row, drafted_rate=2 * row.drafted_rate) for row in made.rows]
    monkeypatch.setattr(report, "measure", lambda *_, **__: iter(faster))
    monkeypatch.setattr(demo, "WIDTH", WIDTH)
    words = [*WORDS, "--against", str(made.folder), "--out"]
    assert main([*words, str(tmp_path / "same"), "--tree", "chain:3"]) == 0
    printed = capsys.readouterr().out
    assert "tree chain:2 instead of chain:3" in printed
    lines = printed[printed.index("earlier report") :].splitlines()
    assert [line.split()[-1] for line in lines[3:7]] == ["2.00"] * 4
    assert lines[1].split()[:3] == ["prompts", "temperature", "batch"]
    for more, expected in (
        (["--tokens", "7"], "tokens 6 instead of 7"),
        (["--batch", "1"], "batch [2, 1, 2] instead of [1]"),
        (["--seed", "1"], "seed 0 instead of 1"),
        (["--num-prompts", "2"], "--num-prompts 3 instead of 2; prompts {'sample': "),
    ):
        assert main([*words, str(tmp_path / "other"), *more]) == 2
        error = capsys.readouterr().err
        assert "--against: expected a report of the same load, got " in error and expected in error
    cut = json.loads((made.folder / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(cut | {"results": cut["results"][:3]}))
    assert main([*WORDS, "--against", str(tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "expected 4 rows in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--target", "somewhere"], "--head: expected what drafts for somewhere, got none"),
        (["--against", "nowhere"], "--against: expected a folder with report.json, got nowhere"),
        (["--prompts", "sample,nonsense"], "nonsense"),
        (["--prompts", "sample,sample"], "--prompts: expected sets and files of different names"),
        (["--accept", "block", "--tree", "topk:4,2,2"], '"block" needs a chain'),
    ],
)
def test_report_command_with_wrong_options_measures_nothing(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(report.BenchPair, "of", lambda arguments: pytest.fail("loaded"))
    assert main(["bench", "report", "--out", str(tmp_path / "out"), *words]) == 2
    assert expected in capsys.readouterr().err


def test_report_command_never_replaces_a_report(made: Made, capsys: pytest.CaptureFixture) -> None:
    assert main([*WORDS, "--out", str(made.folder)]) == 2
    assert "--out: expected a folder without a report" in capsys.readouterr().err


def test_report_command_without_matplotlib_names_the_extra_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def no_matplotlib(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(plot.importlib, "import_module", no_matplotlib)
    assert report_files.matplotlib_module is plot.matplotlib_module
    with pytest.raises(ImportError, match=r"\.\[notebooks\]"):
        report_files.check(tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_report_error_of_the_acceptance_of_one_prompt_is_not_a_number(made: Made) -> None:
    where, logs, arrivals, tree, *_ = made.calls[0]
    one = [arrivals[0]]
    logs = [[log._replace(served=[s for s in log.served if s.arrival is one[0]]) for log in pair] for pair in logs]
    assert tree == Tree.chain(2)
    row = report.compare(where, logs, one, tree, 1, True)
    assert np.isnan(row.error) and row.length >= 1 and row.requests == 1
