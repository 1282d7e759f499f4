"""The routes /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API.

The requests are those of chat completions in another form. Signatures of thinking blocks are empty.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from jspec.engine.request.request import Chunk
from jspec.server.ask import anthropic_input as read
from jspec.server.ask.fields import BOTH, SAMPLING, Ask, Field
from jspec.server.ask.values import given, mapping, never
from jspec.server.http.errors import ApiError, anthropic_body, invalid, refused
from jspec.server.http.events import event, send_json
from jspec.server.reading.blocks import CALL, REASONING, AnswerBlock, AnswerBlocks, Step
from jspec.server.routes.calls import Output
from jspec.server.routes.chat import ChatAnswer, check_conversation, render, template_names
from jspec.server.routes.service import Service

STOP_REASONS = {"eos": "end_turn", "stop": "end_turn", "length": "max_tokens"}
NO_TOOLS = "the server has no tools of its own"
MESSAGES = {
    **SAMPLING,
    **{name: Field(given) for name in ("metadata", "service_tier", "cache_control", "inference_geo")},
    **{name: BOTH[name] for name in ("model", "stream", "max_tokens", "structured_outputs")},
    "messages": Field(given),
    "system": Field(given),
    "stop_sequences": Field(BOTH["stop"].read, "stop"),
    "tools": Field(given),
    "tool_choice": Field(mapping),
    "thinking": Field(mapping),
    "output_config": Field(mapping),
    "chat_template_kwargs": Field(mapping),
    "container": Field(never(NO_TOOLS)),
    "mcp_servers": Field(never(NO_TOOLS)),
    "context_management": Field(never("prompts are never cut; shorten the messages")),
}
DELTAS = {CALL: ("input_json_delta", "partial_json"), REASONING: ("thinking_delta", "thinking")}


class MessageAnswer(ChatAnswer):
    """A request to /v1/messages, and its answer."""

    table = MESSAGES
    prefix = "msg_"

    def __init__(self, service: Service, ask: Ask) -> None:
        if "max_tokens" not in ask.params:
            raise invalid("max_tokens", "expected the largest number of tokens of the answer, got nothing")
        translate(service, ask)
        super().__init__(service, ask)
        self.names["response_format"] = "output_config"
        self._blocks = AnswerBlocks()
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._has_begun = False

    # -- the whole answer

    def body(self, outputs: Sequence[Output]) -> dict[str, Any]:
        self.count_output(outputs)
        for _, chunk in outputs:
            self._read(chunk)
        return self._message([_content(block) for block in self._blocks.all])

    def _read(self, chunk: Chunk) -> list[tuple[Step, AnswerBlock, str]]:
        """Add new output to the blocks; return what it does to them."""
        steps = [step for part in self._messages[0].parts(chunk) for step in self._blocks.add(part)]
        if chunk.finish_reason is not None:
            steps += self._blocks.end()
            calls = [_object_of(block.text) for block in self._blocks.all if block.kind == CALL]
            self._ending = _end_of(chunk, has_calls=calls != [] and None not in calls)
        return steps

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        header = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**header, "content": content, **self._ending, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"] - self.num_cached,
            "cache_read_input_tokens": self.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    # -- the stream

    def events(self, outputs: Sequence[Output]) -> str:
        texts = []
        if not self._has_begun:
            self._has_begun = True
            texts.append(_event("message_start", message=self._message([])))
        self.count_output(outputs)
        for _, chunk in outputs:
            texts += [_step(*step) for step in self._read(chunk)]
        return "".join(texts)

    def last_events(self) -> str:
        return _event("message_delta", delta=self._ending, usage=self._usage()) + _event("message_stop")

    def error_events(self, error: ApiError) -> str:
        return event(anthropic_body(error), "error")


class CountTokens:
    """The ASGI application of /v1/messages/count_tokens: the number of tokens of a request's prompt."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask = await self._service.read(scope, receive, MESSAGES)
        translate(self._service, ask)
        engine, fields = self._service.engine, ask.own
        check_conversation(engine, fields)
        try:
            tokens = await self._service.in_thread(lambda: render(engine.tokenizer, fields))
        except (TypeError, ValueError) as error:
            raise refused(error, ask.names | template_names(fields), MESSAGES, "messages") from error
        await send_json(send, {"input_tokens": len(tokens)})


def translate(service: Service, ask: Ask) -> None:
    """Turn the fields of a request into those of chat completions."""
    fields = ask.own
    if "messages" not in fields:
        raise invalid("messages", "expected a list of messages, got nothing")
    made = read.read_messages("messages", fields["messages"], fields.pop("system", None))
    fields["messages"], ask.names = made.messages, {**ask.names, **read.NAMES, **made.names}
    if made.last["role"] == "assistant" and "tool_calls" not in made.last:
        fields["continue_final_message"] = True
    if "tools" in fields:
        fields["tools"] = read.read_tools("tools", fields["tools"])
    if "tool_choice" in fields:
        fields |= read.read_tool_choice("tool_choice", fields.pop("tool_choice"))
    schema = read.read_format("output_config", fields.pop("output_config", {}))
    if schema is not None:
        ask.set("output_config", {"json_schema": schema})
    if "thinking" in fields:
        template = str(getattr(service.engine.tokenizer, "chat_template", None))
        thinking = fields.pop("thinking")
        variables = read.read_thinking("thinking", thinking, template)
        budget = read.read_budget("thinking", thinking, ask.params.get("max_tokens"))
        if budget is not None:
            ask.set("thinking.budget_tokens", {"thinking_budget": budget})
        fields["chat_template_kwargs"] = variables | fields.get("chat_template_kwargs", {})


def _content(block: AnswerBlock) -> dict[str, Any]:
    """Return a whole block of content; a call whose arguments are no JSON object is text."""
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = _object_of(block.text) if block.kind == CALL else None
    if arguments is None:
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _object_of(arguments: str) -> dict[str, Any] | None:
    """Return the object that a JSON text holds; None if it holds none, or one with an infinity or half a character."""
    try:
        read = json.loads(arguments)
        json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        return None
    return read if isinstance(read, dict) else None


def _end_of(chunk: Chunk, *, has_calls: bool) -> dict[str, Any]:
    """Return why a message has ended.

    Args:
        has_calls: whether it has calls, all of them whole.
    """
    assert chunk.finish_reason is not None
    if chunk.finish_reason == "stop" and isinstance(chunk.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
    reason = STOP_REASONS.get(chunk.finish_reason, chunk.finish_reason)
    return {"stop_reason": "tool_use" if has_calls and reason == "end_turn" else reason, "stop_sequence": None}


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)


def _step(step: Step, block: AnswerBlock, text: str) -> str:
    """Return the event of what happens to a block."""
    if step == "end":
        return _event("content_block_stop", index=block.index)
    if step == "add":
        kind, key = DELTAS.get(block.kind, ("text_delta", "text"))
        return _event("content_block_delta", index=block.index, delta={"type": kind, key: text})
    empty = AnswerBlock(block.index, block.kind, block.call_id, block.name, "{}" if block.kind == CALL else "")
    return _event("content_block_start", index=block.index, content_block=_content(empty))
