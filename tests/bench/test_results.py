"""Tables, JSON files and options of the bench commands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.models.mlps.mlp_config import Dense
from jspec.tools.bench import options, random_models, results
from jspec.tools.bench.cli import COMMANDS
from jspec.tools.bench.inflate.grow import sizes_of
from jspec.tools.bench.results import Column, Results
from jspec.tools.command_line import make_parser
from jspec.tools.convert_command import STORED
from pallas_kernels.layers.weights import EXPERT_KINDS, KINDS

pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Inner:
    tree: Annotated[Tree | None, Column("tree", results.tree_name)]
    context: float


@dataclass(frozen=True)
class ReportedResult:
    inner: Inner
    share: Annotated[float | None, Column("share", ".0%")]
    never: Annotated[float | None, Column("never", ".1f")] = None


RESULTS = [ReportedResult(Inner(None, math.inf), 0.25), ReportedResult(Inner(Tree.chain(2), 8), math.nan)]
PLAIN = [
    {"inner": {"tree": "none", "context": "inf"}, "share": 0.25, "never": None},
    {"inner": {"tree": "chain:2", "context": 8}, "share": None, "never": None},
]


def test_report_table_leaves_out_columns_without_values() -> None:
    lines = results.table_of([*RESULTS, ReportedResult(RESULTS[0].inner, None)]).splitlines()
    rows = [["tree", "share"], ["none", "25%"], ["chain:2", "nan%"], ["none"]]
    assert [line.split() for line in lines if "-" not in line] == rows
    assert results.table_of([ReportedResult(Inner(None, 1.0), None, 2.0)]).splitlines()[2].split() == ["none", "2.0"]
    assert results.table_of([{"no": "record"}]) == ""


def test_report_records_are_converted_to_json_values() -> None:
    assert json.loads(json.dumps(results.plain(RESULTS))) == PLAIN
    named = {"file": Path("a"), "column": Column("a", "b"), "ks": (1, 2)}
    assert results.plain(named) == {"file": "a", "column": {"heading": "a", "format": "b"}, "ks": [1, 2]}


def test_report_command_prints_table_and_writes_json_result_by_result(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, seen = tmp_path / "out.json", []

    def measured() -> Iterator[ReportedResult]:
        seen.append((capsys.readouterr(), []))
        yield RESULTS[0]
        seen.append((capsys.readouterr(), json.loads(path.read_text())["results"]))
        yield from RESULTS[1:2]

    assert results.measure(Results("what", measured(), "after", {"seed": 3}, count=2), path) == 0
    assert seen == [(("", "what\n"), []), (("", "row  tree  share\n1 of 2  none  25%\n"), PLAIN[:1])]
    printed, written = capsys.readouterr().out.splitlines(), json.loads(path.read_text())
    assert printed[0] == f"what; {results.environment_text()}" and printed[-1] == "after" and len(printed) == 6
    assert written == {"environment": results.environment(), "seed": 3, "results": PLAIN}


@pytest.mark.parametrize(
    ("kind", "floors"),
    [
        ("NVIDIA H200", "NVIDIA H200, 4.30 TB/s, 790 TFLOP/s"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3, 3.02 TB/s, 789 TFLOP/s"),
        ("another", "none, as the memory bandwidth of this device is unknown"),
    ],
)
def test_report_environment_line_names_device_and_its_rates(
    kind: str, floors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results.jax, "devices", lambda: [SimpleNamespace(device_kind=kind, platform="gpu")])
    text = results.environment_text()
    assert text.startswith(f"device: {kind} (gpu), jax ") and text.endswith(f"; floors: {floors}")
    assert results.environment()["device"] == kind


def parser_of(command: str) -> Any:
    """Return the parser of a subcommand of `jspec bench`."""
    parser: Any = make_parser()
    for name in ("bench", command):
        parser.format_help()  # declares the options
        parser = next(one for one in parser._actions if one.choices and name in one.choices).choices[name]
    parser.format_help()
    return parser


@pytest.mark.parametrize("command", COMMANDS)
def test_bench_option_of_every_command_has_help_with_its_default(command: str) -> None:
    parser = parser_of(command)
    assert len(parser._actions) > 5
    for option in parser._actions[1:]:  # all but --help
        assert option.help and "\n" not in option.help, option
        if option.option_strings and option.nargs != 0:  # not a switch
            assert "default: " in parser._get_formatter()._get_help_string(option), option


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step --tree foo", "argument --tree: tree: expected chain:LENGTH, topk:NODES,DEPTH,K or static:"),
        ("acceptance --tree foo", "argument --tree: tree: expected chain:LENGTH"),
        ("step --batch 0", "argument --batch: expected at least 1, got 0"),
        ("step --idle=-1", "argument --idle: expected at least 0, got -1"),
        ("step --shape tiny:x", "argument --shape: expected one of deepseek-v2-lite, "),
        ("serve --shape larger", "tiny-moe, or NAME:LAYERS, got larger"),
        ("serve --repeats 0", "argument --repeats: expected at least 1, got 0"),
        ("step --tensor-parallel a", "argument --tensor-parallel: invalid int value: 'a'"),
    ],
)
def test_bench_option_with_wrong_value_prints_what_was_expected(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words.split()])
    assert message in capsys.readouterr().err


def test_shapes_and_drafters_of_the_options_are_those_that_the_commands_know() -> None:
    assert list(options.SHAPES) == sorted(random_models.TARGETS)
    dense = {name for name, one in random_models.TARGETS.items() if all(isinstance(x.mlp, Dense) for x in one.layers)}
    assert list(options.DENSE) == sorted(dense)
    assert list(options.DRAFTERS) == sorted(random_models.HEADS)
    assert options.KINDS == KINDS
    assert tuple(kind for kind in KINDS if kind in EXPERT_KINDS) == STORED
    sizes = sizes_of("tiny")
    assert list(sizes) == [*options.SIZES, "draft_vocab_size"] and sizes["num_layers"] == 8
    assert set(options.OPTIONS) == set(COMMANDS)


def test_bench_has_at_most_2700_lines() -> None:
    """What measures is no reason to use jspec: what is added to it is taken away elsewhere in it."""
    files = [*Path(results.__file__).parent.rglob("*.py")]
    assert len(files) > 10 and sum(len(file.read_text().splitlines()) for file in files) <= 2700
