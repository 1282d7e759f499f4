"""Test that reasoning is split off, alone and before tool calls, however the text is split."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.server.reading import reasoning
from tests.support.answers import Joined, auto, check_every_split, joined, parsed, split

pytestmark = pytest.mark.once

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
INSIDE = "<|im_start|>assistant\n<think>\n"
CASES = [
    ("", "<think>\nI add.\n</think>\n\nIt is 3.", Joined("It is 3.", "I add.")),
    (INSIDE, "I add.\n</think>\n\nIt is 3.", Joined("It is 3.", "I add.")),
    (INSIDE, "<think>\nI add.</think>3", Joined("3", "I add.")),
    ("", " <think></think> ", Joined()),
    ("", "<think>\n\n</think>\n\n3\n", Joined("3\n")),
    ("", "<think>I add", Joined(reasoning="I add")),
    (INSIDE, "I add </thin \n", Joined(reasoning="I add </thin \n")),
    ("", "3 <think>I</think>", Joined("3 <think>I</think>")),
    (" \n<think>\n\n</think>\n\n", "I add.</think>3", Joined("I add.</think>3")),
    ("", "<think>a <think> b</think>c</think>d", Joined("c</think>d", "a <think> b")),
    ("", " <thin", Joined(" <thin")),
    ("", f"<think>\nI call {CALL} now.\n</think>\n\n{CALL}\n", Joined("", f"I call {CALL} now.", [("f", '{"x": 1}')])),
    (INSIDE, f"I call.</think>\nSee: {CALL}", Joined("See:", "I call.", [("f", '{"x": 1}')])),
    (INSIDE, f"I call {CALL}", Joined(reasoning=f"I call {CALL}")),
]


@pytest.mark.parametrize(("prompt", "text", "expected"), CASES)
def test_parser_with_reasoning_splits_it_off(prompt: str, text: str, expected: Joined) -> None:
    assert check_every_split(partial(auto, "hermes", reasoning=True, prompt=prompt), text) == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", " \n", "a", CALL]), max_size=7),
    prompt=st.sampled_from(["", INSIDE]),
    cuts=st.lists(st.integers(0, 100), max_size=5),
)
def test_parser_with_reasoning_gives_the_same_for_any_split(text: list[str], prompt: str, cuts: list[int]) -> None:
    whole, make = "".join(text), partial(auto, "hermes", reasoning=True, prompt=prompt)
    assert parsed(make, split(whole, cuts)) == parsed(make, [*whole]) == parsed(make, [whole])


def test_parser_without_reasoning_leaves_the_markers_in_the_content() -> None:
    text = "<think>I add.</think> 3"
    assert check_every_split(partial(auto, "hermes"), text) == Joined(text)


def test_parser_hands_reasoning_on_while_it_arrives() -> None:
    parser, shown = auto("hermes", reasoning=True, prompt=INSIDE), ""
    for character in "I add 1 < 2":
        shown += joined(parser.push(character)).reasoning
    assert shown == "I add 1 < 2"
    assert parser.push(" </think") == []
    assert joined([*parser.push(" "), *parser.finish()]).reasoning == " </think "


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (INSIDE, True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_answer_begins_in_reasoning_exactly_if_the_prompt_ends_with_its_marker(prompt: str, expected: bool) -> None:
    assert reasoning.begins_in(prompt) is expected


def test_template_with_the_closing_marker_is_one_of_a_reasoning_model() -> None:
    assert reasoning.is_used_by("{% set content = content.split('</think>')[-1] %}")
    assert not reasoning.is_used_by("{{ messages[0].content }}") and not reasoning.is_used_by(None)
