"""Test `jspec demo`, and `jspec info` of the embedded pair of models."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jspec import Engine, Model, SamplingParams
from jspec.__main__ import main
from jspec.engine.request.request import Chunk
from jspec.tools import colour, demo
from jspec.tools.command_line import make_parser
from jspec.tools.testing import last_logits

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
        patch.setattr(demo, "engine", lambda *, drafted, target: nullcontext(engines[drafted]))
        patch.setattr(demo, "widened", lambda: None)
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
    (passes,) = re.findall(r"EAGLE-3 chain of 3 +(\d+)  =", printed)
    assert share == pytest.approx(1 - int(passes) / demo.TOKENS, abs=0.02), "each round adds one token of the target's"


def test_demo_prints_passes_as_bars_then_speeds_then_the_verdict_and_next_commands(printed: str) -> None:
    after = printed.split("drafted and accepted\n\n")[1]
    passes, explanation, speeds, verdict, next_ = after.split("\n\n")
    heading, plain, drafted = passes.splitlines()
    many, few = map(int, re.fullmatch(r"forward passes of the target: (\d+) -> (\d+)", heading).groups())  # type: ignore[union-attr]
    assert many == demo.TOKENS - 1 and many / few == pytest.approx(3, abs=0.5)
    assert plain.split() == ["plain", str(many), "=" * demo.BAR]
    assert drafted.split()[-2:] == [str(few), "=" * round(demo.BAR * few / many)]
    title, columns, _, slow, fast = speeds.splitlines()
    assert title == f"speed on this CPU, the best of {demo.RUNS} runs in turns:"
    assert columns.split() == ["tokens/s", "speed-up", "tokens", "per", "pass"]
    assert slow.split()[0] == "plain" and slow.split()[2:] == ["1.0x", "1.00"]
    speed, ratio, length = fast.split()[-3:]
    assert float(ratio.removesuffix("x")) == pytest.approx(int(speed) / int(slow.split()[1]), rel=0.1)
    assert -0.2 < float(length) * few - many < demo.LENGTH, "the limit of tokens may cut the last round"
    assert (explanation, verdict, next_.rstrip()) == (demo.EXPLANATION, "identical output: lossless", demo.NEXT)
    assert max(map(len, printed.splitlines())) <= 80
    lines = [line for line in printed.split(" ...\n")[0].splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), "the text does not repeat"


def test_widened_target_has_the_logits_of_the_embedded_target() -> None:
    small, large = Model.from_pretrained(demo.TARGET, dtype="float32"), demo.widened()
    assert large.config.layers[0].mlp.width == demo.WIDTH > small.config.layers[0].mlp.width  # type: ignore[union-attr]
    np.testing.assert_allclose(last_logits(large, range(1, 40)), last_logits(small, range(1, 40)), atol=1e-3)


def test_demo_output_recommends_commands_that_parse() -> None:
    commands = [line.split()[1:] for line in demo.NEXT.splitlines() if line.startswith("  jspec ")]
    assert [words[0] for words in commands] == ["serve", "generate", "chat"]
    for words in commands:
        make_parser().parse_args([*words[:5], "prompt"] if words[0] == "generate" else words)


def test_demo_on_a_terminal_prints_a_legend_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    chunks = [Chunk("ab", [97, 98], [True, False], pieces=["a", "b"]), Chunk("c", [99], [False], pieces=["c"])]
    out = DemoTerminal()
    demo._print_completion(SimpleNamespace(stream=lambda prompt, params: chunks), SamplingParams(), out)  # type: ignore[arg-type]
    assert out.getvalue().startswith(
        f"{colour.COLOUR}cyan: drafted and accepted{colour.RESET}; plain: the target's own"
    )
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
    eagle, dflash, target, eagle_fit, dflash_fit, kernels = capsys.readouterr().out.split("\n\n")
    assert "model: EAGLE-3.1 head" in eagle and "model: DFlash head" in dflash and "model: llama, 7 layers" in target
    for head, fit in ((demo.HEAD, eagle_fit), (demo.DFLASH, dflash_fit)):
        name, *lines = fit.splitlines()
        assert name == f"{head}:" and "fits: target hidden size: 256" in lines and "mismatch" not in fit
    assert "states 3, 5, 7 of" in eagle_fit and "states 3, 5, 6 of" in dflash_fit
    assert kernels.startswith("kernels on this machine: references on cpu")
    assert [("tokenizer: " in text, "EOS ids: " in text) for text in (eagle, dflash, target)] == [
        (False, False)
    ] * 2 + [(True, True)]
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
