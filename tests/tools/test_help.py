"""Test the help text of every command (options, defaults, examples), and `jspec --version`."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from importlib import metadata

import pytest

import jspec
from jspec.__main__ import main
from jspec.core.config import EngineConfig
from jspec.tools.command_line import make_parser
from jspec.tools.parser import EXAMPLES, Parser, parsers

pytestmark = pytest.mark.once


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]


ALL = {parser.prog: parser for parser in parsers(make_parser())}
OURS = list(ALL)
ANSWERED = ["--version", "nonsense", *(f"{prog.removeprefix('jspec').strip()} --help" for prog in OURS)]
ANSWERED += [
    f"{command} --nonsense" for command in ("demo", "generate", "chat --target a", "serve", "info", "convert a b")
]
ANSWERED += ["generate --target a --model b", "train --lr x", "bench serve --num-requests 5", "bench startup"]


@pytest.mark.parametrize("prog", OURS)
def test_help_of_each_command_describes_every_option(prog: str) -> None:
    assert [action.option_strings or action.dest for action in options(ALL[prog]) if not action.help] == []


@pytest.mark.parametrize("prog", OURS)
def test_help_of_each_command_states_every_default(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # no line breaks
    text = ALL[prog].format_help()
    for action in options(ALL[prog]):
        words = list(action.default) if isinstance(action.default, (list, tuple)) else [action.default]
        if action.nargs != 0 and words not in ([None], [argparse.SUPPRESS]):
            shown = " ".join(str(word).lower() for word in words)
            assert f"; default: {shown}\n" in text or "default: " in (action.help or "")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_help_of_long_commands_has_groups_and_the_engines_defaults_in_numbers(command: str) -> None:
    parser = ALL[f"jspec {command}"]
    sizes = {group.title: len(group._group_actions) for group in parser._action_groups if group._group_actions}
    assert {"target", "drafter", "weights and caches", "devices and processes"} < set(sizes)
    assert ("sampling" in sizes) == (command != "serve") and max(sizes.values()) <= 20
    text = " ".join(parser.format_help().split())
    assert f"default: {EngineConfig().max_len}, or the target's" in text and "the engine's" not in text
    assert (f"default: {EngineConfig().memory_fraction}" in text) == (command == "serve")


@pytest.mark.parametrize("prog", ALL)
def test_help_of_each_command_ends_with_two_examples_that_parse(prog: str) -> None:
    *_, heading, first, second = ALL[prog].format_help().splitlines()
    assert heading == "examples:"
    for line in (first, second):
        assert line.startswith(f"  {prog}")
        make_parser().parse_args(shlex.split(line.split(" > ")[0])[1:])


def test_help_examples_belong_to_existing_commands() -> None:
    assert set(EXAMPLES) == set(ALL)


def test_help_of_an_option_with_a_percent_sign_and_a_list_prints_both(capsys: pytest.CaptureFixture) -> None:
    parser = Parser(prog="p")
    parser.add_argument("--share", default=["5%", None], help="share")
    parser.print_help()
    assert "share; default: 5% none" in capsys.readouterr().out


def test_version_option_prints_the_packages_version(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jspec {jspec.__version__}\n"
    assert all(part.isdecimal() for part in jspec.__version__.split("."))
    names = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    assert names.get("jspec-decode", jspec.__version__) == jspec.__version__


def test_help_version_and_wrong_arguments_are_answered_before_jax_is_imported() -> None:
    code = (
        "import contextlib, json, sys; from jspec.__main__ import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    with contextlib.suppress(SystemExit): main(line.split())\n"
        "    if 'jax' in sys.modules: sys.exit(f'after {line}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(ANSWERED)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
    assert "jspec: argument command: invalid choice: 'nonsense'" in done.stderr, (
        "negative control: the lines are parsed"
    )


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("bench serve --num-requests 5", "jspec bench serve: unrecognized arguments: --num-requests 5"),
        ("generate --target a --quiet b", "jspec generate: unrecognized arguments: --quiet"),
        ("demo --slots 3", "jspec demo: unrecognized arguments: --slots 3"),
        (
            "convert a b --quantise int8",
            "jspec convert: unrecognized arguments: --quantise int8; did you mean --quantize?",
        ),
    ],
)
def test_unknown_option_of_a_subcommand_names_the_help_of_that_subcommand(
    line: str, error: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    said = capsys.readouterr().err
    assert said.startswith(error) and said.endswith(f"; see {error.partition(':')[0]} --help\n")
