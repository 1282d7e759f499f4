"""Test that reasoning is split off, in every format, alone and before tool calls, however the text is split."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.engine.reading import reasoning
from jspec.engine.reading.reasoning import FORMATS
from jspec.server.tool_calls.choose import FORMATS as CALL_FORMATS
from tests.support.answers import Joined, auto, check_every_split, joined, parsed, scraps_of, split

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
    assert check_every_split(partial(auto, "hermes", reasoning="think", prompt=prompt), text) == expected


ADDED = Joined("It is 3.", "I add.")
WRITTEN = [  # a format, the end of a prompt and an answer as the families' templates write them
    ("seed_oss", "<seed:bos>assistant\n", "<seed:think>I add.</seed:think>\nIt is 3."),
    ("seed_oss", "<seed:think><seed:cot_budget_reflect>", "I add.</seed:think>It is 3."),
    ("mistral", "[/INST]", "[THINK]I add.[/THINK]It is 3."),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nI add.\n<channel|>It is 3."),
    ("granite", "", "Here is my thought process:\n\nI add.\n\nHere is my response:\n\nIt is 3."),
    ("granite", "", "Here's my thought process: I add. Here's my response: It is 3."),
    ("granite_tags", "", "<think>I add.</think>\n<response>It is 3.</response>"),
]


@pytest.mark.parametrize(("name", "prompt", "text"), WRITTEN)
def test_parser_reads_the_reasoning_of_each_family(name: str, prompt: str, text: str) -> None:
    assert check_every_split(partial(auto, "hermes", reasoning=name, prompt=prompt), text) == ADDED
    calls = [("f", '{"x": 1}')]
    assert parsed(partial(auto, "hermes", reasoning=name, prompt=prompt), [text + CALL]) == Joined(
        "It is 3.", "I add.", calls
    )


@pytest.mark.parametrize(
    ("name", "prefill", "text", "expected"),
    [
        ("think", "<think>\nI ", "add.</think>3", Joined("3", "add.")),
        ("think", "<think>\nI", " add.\n</think>\n3", Joined("3", " add.")),
        ("think", "<think>", "\nI add.</think>3", Joined("3", "I add.")),
        ("think", "<think>\nI add.</think>\nIt", " is 3.</think>", Joined(" is 3.</think>")),
        ("think", "What <think> is", " this</think>3", Joined("3", " this")),
        ("think", "It", " is 3.", Joined(" is 3.")),
        ("seed_oss", "<seed:think>I", " add.</seed:think>3", Joined("3", " add.")),
        ("mistral", "[THINK]I", " add.[/THINK]3", Joined("3", " add.")),
        ("gemma4", "<|channel>thought\nI", " add.<channel|>3", Joined("3", " add.")),
        ("granite", "Here is my thought process: I", " add. Here is my response: 3", Joined("3", " add.")),
    ],
)
def test_reasoning_that_a_prefill_has_begun_goes_on(name: str, prefill: str, text: str, expected: Joined) -> None:
    make = partial(auto, "hermes", reasoning=name, prompt="<|assistant|>\n", prefill=prefill)
    assert check_every_split(make, text) == expected


def test_reasoning_that_the_template_begins_before_a_prefill_goes_on() -> None:
    make = partial(auto, "hermes", reasoning="think", prompt=INSIDE, prefill="I")
    assert check_every_split(make, " add.</think>3") == Joined("3", " add.")


# -- harmony; the texts are those of its published description

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
TO_F = "to=functions.f <|constrain|>json<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"
F = [("f", '{"x": 1}')]
MESSAGES = [
    (f"{ANALYSIS}User greets.<|end|>{FINAL}Hello!", Joined("Hello!", "User greets.")),
    (f"{ANALYSIS}A.<|end|>{FINAL}2 + 2 = 4.\n<|return|>", Joined("2 + 2 = 4.", "A.")),
    (f'{ANALYSIS}Need f.<|end|>{COMMENTARY} {TO_F}{{"x": 1}}<|call|>', Joined("", "Need f.", F)),
    (f'{ANALYSIS}Need f.<|end|>{COMMENTARY} {TO_F}{{"x": 1}}', Joined("", "Need f.", F)),
    (
        f"{ANALYSIS}A.<|end|>{COMMENTARY}<|message|>**Action plan**:\n1. f<|end|>"
        f'{COMMENTARY} to=functions.f<|constrain|>json<|message|>{{"x": 1}}<|call|>',
        Joined("**Action plan**:\n1. f", "A.", F),
    ),
    ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}', Joined(calls=F)),
    (f'<|channel|>commentary {TO_F}{{"x": 1}}<|call|>{COMMENTARY} {TO_F}{{"x": 1}}', Joined(calls=F * 2)),
    (f"{ANALYSIS}A.<|end|><|start|>assistant{ANALYSIS}B.<|end|>{FINAL}C", Joined("C", "A.\nB.")),
    (f"{ANALYSIS}A.<|end|>{COMMENTARY}<|message|>B.<|end|>{FINAL}C", Joined("B.\nC", "A.")),
    (f"{ANALYSIS}A cut", Joined(reasoning="A cut")),
    (f"{ANALYSIS}A.<|end|><|start|>assistant<|channel|>fi", Joined(reasoning="A.")),
    (f"{ANALYSIS}A.{FINAL}B", Joined("B", "A.")),
    ("Hello, < world", Joined("Hello, < world")),
    (
        f"<|channel|>commentary to=functions.unknown json<|message|>{{}}<|end|>{FINAL}B",
        Joined("<|channel|>commentary to=functions.unknown json<|message|>{}\nB"),
    ),
    (f"<|channel|>analysis to=python code<|message|>1 + 1<|call|>{FINAL}B", Joined("B", "1 + 1")),
    (f"<|channel|>commentary {TO_F}not JSON", Joined("not JSON")),
]


@pytest.mark.parametrize(("text", "expected"), MESSAGES)
def test_parser_splits_messages_of_harmony_by_channel(text: str, expected: Joined) -> None:
    make = partial(auto, "harmony", reasoning="harmony", prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert check_every_split(make, text) == expected


def test_messages_of_harmony_that_the_prompt_has_begun_go_on() -> None:
    make: Any = partial(auto, "harmony", reasoning="harmony")
    assert check_every_split(partial(make, prompt=f"{FINAL}It"), " is 3.<|return|>") == Joined(" is 3.")
    for ended in (f"{FINAL}It is 3.<|end|>", "<|message|>It is 3.<|end|>"):
        assert check_every_split(partial(make, prompt=ended), f" add.{FINAL}3") == Joined(" add.3")
    for header in ("user", "user to=assistant<|channel|>final"):  # of another role, which no answer shows
        begun = f"<|start|>{header}<|message|>It"
        assert check_every_split(partial(make, prompt=begun), f" is.<|end|>{FINAL}3") == Joined(" is.3")
    inside = f"<|start|>assistant{ANALYSIS}I"
    assert check_every_split(partial(make, prompt=inside), f" add.<|end|>{FINAL}3") == Joined("3", " add.")


# -- any text

FORMATS_OF_BOTH = st.tuples(st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(CALL_FORMATS)))


@settings(max_examples=600, deadline=None)
@given(
    case=FORMATS_OF_BOTH.flatmap(
        lambda names: st.tuples(st.just(names), st.lists(st.sampled_from(scraps_of(*reversed(names))), max_size=8))
    ),
    is_begun=st.booleans(),
    prefill=st.sampled_from(["", "I"]),
    cuts=st.lists(st.integers(0, 100), max_size=5),
)
def test_parser_with_reasoning_gives_the_same_for_any_split(
    case: tuple[tuple[str, str], list[str]], is_begun: bool, prefill: str, cuts: list[int]
) -> None:
    (name, tools), text = case
    prompt = f"<|start|>assistant{FORMATS[name].openings[0]}" if is_begun else ""
    make = partial(auto, tools, reasoning=name, prompt=prompt, prefill=prefill)
    whole = "".join(text)
    assert parsed(make, split(whole, cuts)) == parsed(make, [*whole]) == parsed(make, [whole])


def test_parser_without_reasoning_leaves_the_markers_in_the_content() -> None:
    text = "<think>I add.</think> 3"
    assert check_every_split(partial(auto, "hermes"), text) == Joined(text)


@pytest.mark.parametrize(
    ("name", "prompt", "start"), [("think", INSIDE, ""), ("mistral", "[THINK]", ""), ("harmony", "", ANALYSIS)]
)
def test_parser_hands_reasoning_on_while_it_arrives(name: str, prompt: str, start: str) -> None:
    parser, shown = auto("hermes", reasoning=name, prompt=prompt), ""
    assert parser.push(start) == []
    for character in "I add 1 < 2":
        shown += joined(parser.push(character)).reasoning
    assert shown == "I add 1 < 2"
    closing = FORMATS[name].closings[0][:-1]
    assert parser.push(f" {closing}") == []
    assert joined([*parser.push(" "), *parser.finish()]).reasoning == f" {closing} "


# -- which format, and where reasoning begins


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (INSIDE, ""),
        ("<think>", ""),
        ("<think>\n\n</think>\n\n", None),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", None),
        ("", None),
    ],
)
def test_answer_begins_in_reasoning_exactly_if_the_prompt_ends_with_its_marker(
    prompt: str, expected: str | None
) -> None:
    assert reasoning.begun_in(FORMATS["think"], prompt) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% set content = content.split('</think>')[-1] %}", "think"),
        ("<|im_start|>assistant\n<think>", "think"),
        ("{{- '[THINK]' + block['thinking'] + '[/THINK]' }}", "mistral"),
        ("{%- set think_begin_token = '<seed:think>' -%}", "seed_oss"),
        ("{{- '<|channel>thought\\n<channel|>' -}}", "gemma4"),
        ("{{- '<|start|>assistant<|channel|>final<|message|>' }}", "harmony"),
        ("Write your thoughts after 'Here is my thought process:' and your response", "granite"),
        (
            "Write your thoughts between <think></think> and write your response between <response></response>",
            "granite_tags",
        ),
        ("{{ messages[0].content }}", None),
        (None, None),
    ],
)
def test_chat_template_chooses_the_format_of_reasoning(template: str | None, name: str | None) -> None:
    assert reasoning.format_name(template) == name
    assert reasoning.is_used_by(template) is (name is not None)


def test_name_of_a_format_of_reasoning_may_be_that_of_another_server() -> None:
    for name, expected in (("qwen3", "think"), ("deepseek-r1", "think"), ("gpt-oss", "harmony"), ("gemma4", "gemma4")):
        assert reasoning.format_name("{{ '[THINK]' }}", name) == expected
    assert reasoning.format_name(None, "openai_gptoss") == "harmony"
    with pytest.raises(ValueError, match=r"^reasoning_parser: expected one of harmony, .*think, got 'kimi'$"):
        reasoning.format_name(None, "kimi")
