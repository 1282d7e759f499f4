"""The route /v1/responses, OpenAI's Responses API: the requests of chat completions in another form.

Nothing is stored: a request has its whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jspec.engine.reading.json_scanner import is_object
from jspec.engine.request.request import Chunk
from jspec.server.ask.fields import BOTH, SAMPLING, WITHOUT_EFFECT, Ask, Field
from jspec.server.ask.response_input import (
    NAMES,
    included,
    read_input,
    read_reasoning,
    read_text,
    read_tool_choice,
    read_tools,
)
from jspec.server.ask.structured import response_format
from jspec.server.ask.values import boolean, given, mapping, never, only, text
from jspec.server.http.errors import ApiError, invalid
from jspec.server.http.events import event
from jspec.server.reading.blocks import CALL, CONTENT, REASONING, AnswerBlock, AnswerBlocks, Step
from jspec.server.routes.calls import Output
from jspec.server.routes.chat import ChatAnswer
from jspec.server.routes.service import Service

STORES_NOTHING = "the server stores nothing; send the whole conversation as input"
ECHOED = ("instructions", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools", "user")
RESPONSES = {
    **SAMPLING,
    **WITHOUT_EFFECT,
    **{name: BOTH[name] for name in ("model", "stream", "stream_options", "structured_outputs")},
    "input": Field(given),
    "instructions": Field(text),
    "max_output_tokens": Field(given, "max_tokens"),
    "tools": Field(given),
    "tool_choice": Field(given),
    "parallel_tool_calls": Field(boolean),
    "text": Field(mapping),
    "reasoning": Field(mapping),
    "include": Field(included),
    "chat_template_kwargs": Field(mapping),
    "truncation": Field(only("disabled", "prompts are never cut; shorten the input")),
    "store": Field(only(False, STORES_NOTHING)),
    "background": Field(only(False, STORES_NOTHING)),
    "previous_response_id": Field(never(STORES_NOTHING)),
    "conversation": Field(never(STORES_NOTHING)),
    "prompt": Field(never(STORES_NOTHING)),
    "max_tool_calls": Field(never("the server has no tools of its own")),
    "top_logprobs": Field(only(0, "log-probabilities are offered by /v1/chat/completions alone")),
}
PARTS = {CONTENT: "output_text", REASONING: "reasoning_text"}


class ResponseAnswer(ChatAnswer):
    """A request to /v1/responses, and its answer."""

    table = RESPONSES
    prefix, prompt_field = "resp_", "input"

    def __init__(self, service: Service, ask: Ask) -> None:
        self._echo = {name: ask.own[name] for name in ECHOED if name in ask.own}
        _translate(ask)
        super().__init__(service, ask)
        self.names |= {"messages": "input", "chat": "input", "prompt": "input", "response_format": "text"}
        self._blocks = AnswerBlocks()
        self._num_events = 0
        self._finish_reason: str | None = None
        self._has_failed = False

    # -- the whole answer

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        self.count_output(outputs)
        for _, chunk in outputs:
            self._read(chunk)
        return self._response(self._status)

    def _read(self, chunk: Chunk) -> list[tuple[Step, AnswerBlock, str]]:
        """Add new output to the blocks; return what it does to them."""
        steps = [step for part in self._messages[0].parts(chunk) for step in self._blocks.add(part)]
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            steps += self._blocks.end()
        return steps

    @property
    def _status(self) -> str:
        is_broken = self._messages[0].has_broken_call
        return "incomplete" if self._finish_reason == "length" or is_broken else "completed"

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """Return the response object, which has output and usage once it has ended."""
        is_cut, has_begun = self._finish_reason == "length", status == "in_progress"
        failure = None if error is None else {"code": "server_error", "message": error.message}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": failure,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut and status == "incomplete" else None,
            "output": [] if has_begun else [self._item(block) for block in self._blocks.all],
            "usage": None if has_begun else self._usage(),
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """Return the request's fields as they are repeated in a response."""
        params = self.params
        fields: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
        fields |= {"max_output_tokens": params.max_tokens}
        fields |= {"background": False, "truncation": "disabled", "previous_response_id": None}
        fields |= {"instructions": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None, "tools": []}
        return fields | {"text": {"format": {"type": "text"}}, "tool_choice": "auto"} | self._echo

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        thought = sum(message.num_reasoning_tokens for message in self._messages.values())
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.num_cached, "cache_write_tokens": 0},  # writes cost nothing
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }

    def _item(self, block: AnswerBlock, status: str | None = None) -> dict[str, Any]:
        """Return a block as an item of the output."""
        is_cut = block is self._blocks.all[-1] and (self._finish_reason == "length" or self._has_failed)
        is_cut |= block.kind == CALL and not is_object(block.text)
        status = status or ("incomplete" if is_cut else "completed")
        if block.kind == CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"id": f"fc_{block.id}", "type": "function_call", "status": status, **call}
        content = [] if status == "in_progress" else [_part(block)]
        if block.kind == REASONING:
            return {"id": f"rs_{block.id}", "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": f"msg_{block.id}", "type": "message", "status": status, "role": "assistant", "content": content}

    # -- the stream

    def events(self, outputs: Sequence[Output]) -> str:
        self.count_output(outputs)
        texts = []
        if not self._num_events:
            response = self._response("in_progress")
            texts += [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]
        for _, chunk in outputs:
            texts += [self._step(*step) for step in self._read(chunk)]
        return "".join(texts)

    def last_events(self) -> str:
        return self._event(f"response.{self._status}", response=self._response(self._status))

    def error_events(self, error: ApiError) -> str:
        self._has_failed = True
        return self._event("response.failed", response=self._response("failed", error))

    def _event(self, kind: str, **data: Any) -> str:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **data}, kind)

    def _step(self, step: Step, block: AnswerBlock, text: str) -> str:
        """Return the events of what happens to a block."""
        item = self._item(block, "in_progress" if step == "begin" else None)
        location = {"item_id": item["id"], "output_index": block.index}
        if block.kind != CALL:
            location["content_index"] = 0
        if step == "add":
            kind = "function_call_arguments" if block.kind == CALL else PARTS[block.kind]
            more: dict[str, Any] = {"logprobs": []} if block.kind == CONTENT else {}
            return self._event(f"response.{kind}.delta", **location, delta=text, **more)
        whole = {"output_index": block.index, "item": item}
        if step == "begin":
            begun = self._event("response.output_item.added", **whole)
            if block.kind == CALL:
                return begun
            return begun + self._event("response.content_part.added", **location, part=_part(block))
        return self._done(block, location) + self._event("response.output_item.done", **whole)

    def _done(self, block: AnswerBlock, location: dict[str, Any]) -> str:
        if block.kind == CALL:
            return self._event("response.function_call_arguments.done", **location, arguments=block.text)
        more: dict[str, Any] = {"logprobs": []} if block.kind == CONTENT else {}
        done = self._event(f"response.{PARTS[block.kind]}.done", **location, text=block.text, **more)
        return done + self._event("response.content_part.done", **location, part=_part(block))


def _part(block: AnswerBlock) -> dict[str, Any]:
    """Return the one part of an item's content."""
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _translate(ask: Ask) -> None:
    """Turn the fields of a request into those of chat completions."""
    fields = ask.own
    if "input" not in fields:
        raise invalid("input", "expected a text or a list of items, got nothing")
    made = read_input("input", fields.pop("input"), fields.pop("instructions", None))
    fields["messages"], ask.names = made.messages, {**ask.names, **NAMES, **made.names}
    if "tools" in fields:
        fields["tools"] = read_tools("tools", fields["tools"])
    if "tool_choice" in fields:
        fields["tool_choice"] = read_tool_choice("tool_choice", fields["tool_choice"])
    asked = read_text("text", fields.pop("text", {}))
    if asked is not None:
        ask.set("text", response_format("text.format", asked))
    fields |= read_reasoning("reasoning", fields.pop("reasoning", {}))
