"""Test the command that trains a head for the embedded target from scratch, with few prompts and updates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jspec import Eagle3, Engine, SamplingParams, Tree
from jspec.tools import demo
from jspec.tools.demo.training import scratch
from jspec.tools.demo.training.__main__ import main

pytestmark = [pytest.mark.once, pytest.mark.slow]


@pytest.fixture(scope="module")
def found() -> scratch.Prompts:
    return scratch.prompts()


@pytest.fixture(scope="module")
def few(found: scratch.Prompts) -> scratch.Prompts:
    return scratch.Prompts(found.kept[:6], found.outer[:8], found.inner[:12])


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers be short, and let training read few texts at once."""
    monkeypatch.setattr(scratch, "TOKENS", 32)
    monkeypatch.setattr(scratch, "OPTIONS", scratch.OPTIONS | dict(length=128, batch=2))
    for run in ("FIRST", "SECOND"):
        monkeypatch.setattr(scratch, run, getattr(scratch, run) | dict(steps=2, eval_every=2))


def test_prompts_are_different_beginnings_of_functions_and_classes_in_whole_lines(found: scratch.Prompts) -> None:
    every = [prompt for some in found for prompt in some]
    assert len(set(every)) == len(every), "no prompt that heads are compared on is trained on"
    assert (len(found.kept), len(found.inner)) == (scratch.KEPT, scratch.INNER) and len(found.outer) > scratch.KEPT
    assert all(prompt.endswith("\n") and scratch.START < len(prompt) < scratch.LONGEST for prompt in every)
    assert all(re.match("class |def |@", prompt) for prompt in every)


def test_acceptance_is_the_mean_number_of_tokens_of_a_round(few: scratch.Prompts) -> None:
    tree = Tree.chain(scratch.DEPTH)
    head = Eagle3.from_pretrained(demo.HEAD, tree=tree, dtype="float32")
    options: dict[str, Any] = dict(slots=6, buckets=(6,), max_len=256, dtype="float32", controls=False)
    with Engine.from_pretrained(demo.TARGET, drafter=head, **options) as engine:
        params = SamplingParams(max_tokens=scratch.TOKENS, temperature=0)
        rounds = [one for done in engine.generate(few.kept, params, trace=True) for one in done.rounds]
    expected = 1 + sum(len(one.emitted[: one.accept_len]) for one in rounds) / len(rounds)  # the last may be cut
    mean, error = scratch.acceptance(demo.HEAD, few.kept)
    assert mean == pytest.approx(expected, rel=1e-6) and 0 < error < 1


def test_command_trains_a_head_on_the_targets_answers_and_compares_it(
    few: scratch.Prompts, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "prompts", lambda: few)
    assert main(["--scratch", str(tmp_path)]) == 0
    figures = re.findall(r"(new|embedded) head: (\d\.\d\d) \+- \d\.\d\d tokens a round", capsys.readouterr().out)
    assert [name for name, _ in figures] == ["new", "embedded"] and float(figures[1][1]) > float(figures[0][1]) >= 1
    lines = {
        name: [json.loads(line)["text"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    }
    begin = {"first": few.inner[:6], "second": few.outer + few.inner[6:]}
    for name, prompts in begin.items():
        assert all(text.startswith(tuple(prompts)) for text in lines[name])
