"""Test that each route finds in any answer what its text has, streamed or whole, wherever its tokens begin."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jspec.engine.reading.reasoning import FORMATS
from jspec.server.tool_calls.choose import FORMATS as CALL_FORMATS
from jspec.server.tool_calls.choose import MARKERS, parser_for
from jspec.server.tool_calls.tools import read_choice
from tests.server.test_chat_tools import TOOLS
from tests.server.test_every_route import PATHS, Found, body_of, read_whole
from tests.support import serving, tool_serving
from tests.support.answers import joined, scraps_of

TEMPLATE = tool_serving.HARMONY.replace("{% endif %}", "{{ begun }}{% endif %}")
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
CONTENT, REASONING = ("content", "text", "message"), ("reasoning_content", "thinking", "reasoning")
DETAILS = {"chat": "completion_tokens_details", "responses": "output_tokens_details"}
STOPS = {"chat": "stop", "messages": "stop_sequences"}  # responses have none, and no beginnings of answers


@dataclass(frozen=True)
class AnyAnswer:
    """An answer, and how it is asked for.

    Attributes:
        reasoning, tools: the formats in which it is read.
        begun, prefill: what the chat template and the last message begin of it.
        text: the answer.
        cuts: characters at which a token begins in any case.
        limit: most tokens.
        stop: a stop string; "": none.
        has_tools: whether the request has tools.
        n: number of choices, of chat completions.
    """

    reasoning: str | None
    tools: str
    begun: str
    prefill: str
    text: str
    cuts: list[int]
    limit: int
    stop: str
    has_tools: bool
    n: int

    def fields(self, route: str) -> dict[str, Any]:
        """Return the fields of a request to a route."""
        made = body_of(route, {"chat_template_kwargs": {"begun": self.begun}})
        made["max_output_tokens" if route == "responses" else "max_tokens"] = self.limit
        made |= {STOPS[route]: [self.stop]} if self.stop and route in STOPS else {}
        made |= {} if self.has_tools else {"tools": None}
        if self.prefill and route in STOPS:
            made["messages"] = [*made["messages"], {"role": "assistant", "content": self.prefill}]
        if route == "chat":
            goes_on = {"continue_final_message": True, "add_generation_prompt": False}
            made |= {"n": self.n, "logprobs": True, "stream_options": None, **(goes_on if self.prefill else {})}
        return made

    def expected(self, route: str, tokenizer: Any, ids: list[int]) -> tuple[Found, bool]:
        """Return what a route must find in the answer, and whether a call breaks off."""
        prompt, prefill = f"<|start|>assistant{self.begun}", ""
        text = tokenizer.with_special_tokens(MARKERS).decode(ids[: self.limit])
        if route in STOPS:
            prompt = f"<|start|>assistant<|channel|>final<|message|>{self.prefill}" if self.prefill else prompt
            text, prefill = text.split(self.stop)[0] if self.stop else text, self.prefill
        if self.reasoning is None and not self.has_tools:
            return (text, "", []), False
        choice = read_choice(TOOLS if self.has_tools else None, None)
        parser = parser_for(None, self.tools, choice, self.reasoning, prompt=prompt, prefill=prefill)
        found = joined([*parser.push(text), *parser.finish()])
        return (found.content, found.reasoning, found.calls), parser.has_broken_call


@st.composite
def answers(draw: Any) -> AnyAnswer:
    reasoning, tools = draw(st.sampled_from([None, *FORMATS])), draw(st.sampled_from([*CALL_FORMATS]))
    opening, closing = (FORMATS[reasoning].openings[0], FORMATS[reasoning].closings[0]) if reasoning else ("", "")
    scraps = st.lists(
        st.sampled_from([*scraps_of(tools, reasoning), "\u2028", "é🙂", "<|other|>", "I add. "]), max_size=5
    )
    thought, said = "".join(draw(scraps)), "".join(draw(scraps))
    return AnyAnswer(
        reasoning,
        tools,
        begun=draw(st.sampled_from(["", opening, f"{opening}\n"])),
        prefill=draw(st.sampled_from(["", "", "I", f"{opening}I", f"I.{closing}"])),
        text=f"{draw(st.sampled_from(['', opening]))}{thought}{draw(st.sampled_from(['', closing]))}{said}.",
        cuts=draw(st.lists(st.integers(0, 60), max_size=4)),
        limit=draw(st.integers(1, 20) | st.just(200)),
        stop=draw(st.sampled_from(["", "", "dd", "\n", closing[:3]])),
        has_tools=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 3])),
    )


def read_stream(events: list[Any]) -> Found:
    """Return what the last choice of a stream has, with arguments as they were written."""
    blocks = list[list[str]]()  # kind, name and text of each
    last = max((choice["index"] for event in events for choice in event.get("choices", ())), default=0)
    for event in events:
        for delta in [choice["delta"] for choice in event.get("choices", ()) if choice["index"] == last]:
            for call in delta.get("tool_calls", ()):
                blocks += [["call", call["function"]["name"], ""]] if "id" in call else []
                blocks[-1][2] += call["function"]["arguments"]
            blocks += [[key, "", delta[key]] for key in ("content", "reasoning_content") if key in delta]
        kind = event.get("type", "")
        if kind in ("content_block_start", "response.output_item.added"):
            block = event.get("content_block") or event["item"]
            blocks.append([block["type"], block.get("name", ""), ""])
        elif kind == "content_block_delta":
            blocks[-1][2] += event["delta"][DELTAS[event["delta"]["type"]]]
        elif kind.endswith(".delta"):
            blocks[-1][2] += event["delta"]
    texts = ["".join(text for kind, _, text in blocks if kind in kinds) for kinds in (CONTENT, REASONING)]
    return texts[0], texts[1], [(name, text) for kind, name, text in blocks if kind not in CONTENT + REASONING]


def check(server: serving.Running, answer: AnyAnswer) -> None:
    """Check each route, whole and streamed."""
    engine: Any = server.service.engine
    named = {"reasoning_parser": answer.reasoning, "tool_parser": answer.tools}
    server.service.settings = replace(server.service.settings, **named, reasoning=answer.reasoning is not None)  # type: ignore[arg-type]
    with tool_serving.telling(engine, answer.text, answer.cuts) as ids, server.http() as http:
        for route, path in PATHS.items():
            (content, reasoning, calls), is_broken = answer.expected(route, engine.tokenizer, ids[:-1])
            fields = answer.fields(route)
            whole = http.post(path, json=fields).json()
            options = {"stream_options": {"include_usage": True}} if route == "chat" else {}
            raw = http.post(path, json={**fields, **options, "stream": True}).text
            events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
            assert read_stream(events) == (content, reasoning, calls), route
            if route == "messages":
                calls = [(name, json.dumps(json.loads(text))) for name, text in calls if not is_broken]
            if route != "messages" or not is_broken:
                assert read_whole(route, whole) == (content, reasoning, calls), route
            last = events[-1].get("response", events[-1])
            if route in DETAILS:
                assert whole["usage"].get(DETAILS[route]) == last["usage"].get(DETAILS[route])


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.fuzz)])
def test_any_answer_is_read_alike_by_every_route_streamed_or_whole(count: int) -> None:
    @hypothesis.settings(max_examples=count, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(answers())
    def run(answer: AnyAnswer) -> None:
        check(server, answer)

    with serving.running(tool_serving.special_engine(TEMPLATE)) as server:
        run()
