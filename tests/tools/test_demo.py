"""Test `jspec demo`, and `jspec info` of the embedded pair of models."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jspec import Engine, SamplingParams
from jspec.__main__ import main
from jspec.engine.request.request import Chunk
from jspec.tools import colour, demo
from jspec.tools.command_line import make_parser

pytestmark = pytest.mark.once


class DemoTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[bool, Engine]]:
    """The demo's two engines, by whether they draft."""
    with demo.engine(drafted=True) as speculative, demo.engine(drafted=False) as plain:
        yield {True: speculative, False: plain}


@pytest.fixture(scope="module")
def printed(engines: dict[bool, Engine]) -> str:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "engine", lambda *, drafted: nullcontext(engines[drafted]))
        assert demo.run(out) == 0
    return out.getvalue()


def test_demo_without_terminal_prints_the_plain_text_and_the_share_of_drafted_tokens(
    printed: str, engines: dict[bool, Engine]
) -> None:
    text = printed.split(demo.PROMPT)[1].split(" ...\n")[0]
    (done,) = engines[False].generate(demo.PROMPT, SamplingParams(max_tokens=demo.TOKENS, temperature=0))
    assert (text, len(done.token_ids)) == (done.text, demo.TOKENS) and "\033" not in printed
    _, result = printed.split("cut after ")
    assert result.startswith(f"{demo.TOKENS} tokens, of which ")
    share = int(result.split("of which ")[1].split("%")[0]) / 100
    length = float(printed.split(f"EAGLE-3 chain of {demo.LENGTH}")[1].split("\n")[0].split()[-1])
    assert share == pytest.approx(1 - 1 / length, abs=0.02), "each round adds one token of the target's own"


def test_demo_prints_speed_ups_the_verdict_and_next_commands(printed: str) -> None:
    heading, _, plain, drafted, *explanation, _, verdict, _, next_, one, two, three = printed.splitlines()[-14:]
    assert heading.split() == ["tokens/s", "speed-up", "rounds", "mean", "acceptance", "length"]
    name, *plain_cells = plain.split()
    speed, ratio, rounds, length = drafted.strip().removeprefix(f"EAGLE-3 chain of {demo.LENGTH}").split()
    assert (name, plain_cells[1:]) == ("plain", ["1.0x", str(demo.TOKENS - 1), "1.00"])
    fast, slow = float(speed), float(plain_cells[0])  # rounded to whole numbers, as the ratio is to tenths
    assert (fast - 0.5) / (slow + 0.5) - 0.05 <= float(ratio.removesuffix("x")) <= (fast + 0.5) / (slow - 0.5) + 0.05
    cut = float(length) * int(rounds) - (demo.TOKENS - 1)
    assert -0.2 < cut < demo.LENGTH + 0.2, "the limit of tokens may cut the last round; the length has two decimals"
    assert "\n".join(explanation) == demo.EXPLANATION
    assert verdict == "identical output: lossless"
    assert "\n".join([next_, one, two, three]) == demo.NEXT


def test_demo_output_recommends_commands_that_parse() -> None:
    commands = [line.split()[1:] for line in demo.NEXT.splitlines() if line.startswith("  jspec ")]
    assert [words[0] for words in commands] == ["generate", "chat"]
    for words in commands:
        make_parser().parse_args(words if words[0] == "chat" else [*words[:5], "prompt"])


def test_demo_on_a_terminal_prints_a_legend_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    chunks = [Chunk("ab", [97, 98], [True, False], pieces=["a", "b"]), Chunk("c", [99], [False], pieces=["c"])]
    out = DemoTerminal()
    demo._print_completion(SimpleNamespace(stream=lambda prompt, params: chunks), SamplingParams(), out)  # type: ignore[arg-type]
    assert out.getvalue().startswith(colour.legend())
    assert f"{demo.PROMPT}{colour.COLOUR}a{colour.RESET}bc ...\n" in out.getvalue()


def test_target_ends_functions_and_classes_that_it_writes_greedily(engines: dict[bool, Engine]) -> None:
    lines = ["def get_name(self):", "class NotFoundError(Exception):", "def close(self):", "def __repr__(self):"]
    lines += ["def parse_args(argv):", "def read(path):", "class Stack:", "def is_empty(self):"]
    greedy = SamplingParams(max_tokens=400, temperature=0)
    params = [*[greedy] * len(lines), replace(greedy, ignore_eos=True)]
    *written, endless = engines[True].generate([*lines, lines[0]], params)
    assert [one.finish_reason for one in written] == ["eos"] * len(lines)
    for line, one in zip(lines, written, strict=True):
        ast.parse(line + str(one.text))  # raises SyntaxError if it is no Python
    assert endless.finish_reason == "length"  # no other limit ended them


def test_info_command_demo_describes_target_and_heads(capsys: pytest.CaptureFixture) -> None:
    assert main(["info", "demo"]) == 0
    eagle, dflash, target, eagle_fit, dflash_fit = capsys.readouterr().out.split("\n\n")
    assert "model: EAGLE-3.1 head" in eagle and "model: DFlash head" in dflash and "model: llama, 7 layers" in target
    for head, fit in ((demo.HEAD, eagle_fit), (demo.DFLASH, dflash_fit)):
        name, *lines = fit.splitlines()
        assert name == f"{head}:" and "fits: target hidden size: 256" in lines and "mismatch" not in fit
    assert "states 3, 5, 7 of" in eagle_fit and "states 3, 5, 6 of" in dflash_fit
    assert dflash_fit.splitlines()[-1].startswith("kernels: references on cpu")
    assert main(["info", str(demo.HEAD)]) == 0
    head = capsys.readouterr().out
    assert "EAGLE-3" in head and "llama" not in head


def test_info_command_missing_folder_prints_the_folder_and_exits_2(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["info", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("config", [None, '{"model_type": "unknown"}'], ids=["no model", "unknown model"])
def test_info_command_of_a_folder_that_cannot_be_loaded_says_why_and_exits_1(
    config: str | None, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["info", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "cannot be loaded: " in out
    assert ("no model in this folder" in out) == (config is None)
