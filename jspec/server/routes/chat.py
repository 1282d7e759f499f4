"""The route /v1/chat/completions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from jspec.engine.callers.text_generator import TextGenerator
from jspec.engine.reading import reasoning
from jspec.engine.reading.answers import may_reason, prompt_text, template_of
from jspec.engine.reading.calls import call_delta, whole_calls
from jspec.engine.reading.text_reader import AnswerPart, OutputParser
from jspec.engine.request.request import Chunk, Request
from jspec.engine.request.sampling_params import GRAMMARS
from jspec.engine.request.too_long import check_characters
from jspec.engine.text.chat_template import UnreadVariable
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.ask.fields import CHAT, Ask
from jspec.server.ask.messages import MAX_MESSAGES, render_messages
from jspec.server.ask.values import count_characters
from jspec.server.http.errors import invalid, refused
from jspec.server.reading.acceptance import prediction_details
from jspec.server.reading.logprobs import chat_entries, prompt_entries
from jspec.server.routes.answers import Answer, finish_reason, stop_reason
from jspec.server.routes.service import Service
from jspec.server.tool_calls import forced
from jspec.server.tool_calls.auto_grammar import auto_grammar, is_needed
from jspec.server.tool_calls.choose import MARKERS, format_of, parser_for
from jspec.server.tool_calls.grammar import tool_grammar
from jspec.server.tool_calls.tools import ToolChoice, read_choice

TEMPLATE_OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def render(tokenizer: Tokenizer | None, fields: dict[str, Any]) -> list[int]:
    """Return the token ids of the conversation of a request.

    Args:
        fields: the fields ``messages``, ``tools`` and others of the chat template.

    Raises:
        TypeError, ValueError: the conversation cannot be rendered.
    """
    options, messages = {name: fields[name] for name in TEMPLATE_OPTIONS if name in fields}, fields["messages"]
    if "reasoning_effort" in fields:
        kwargs = {**options.get("chat_template_kwargs", {}), "reasoning_effort": fields["reasoning_effort"]}
        options["chat_template_kwargs"] = kwargs
    choice = read_choice(fields.get("tools"), fields.get("tool_choice"))
    try:
        return render_messages(tokenizer, messages, options)
    except UnreadVariable as error:
        if error.name != "tools" or choice.mode == "auto":
            raise
    tools = options.pop("tools")
    return render_messages(tokenizer, forced.with_tools(messages, tools if choice.is_forced else ()), options)


def check_conversation(engine: TextGenerator, fields: dict[str, Any], field: str = "messages") -> None:
    """Check that there are messages, a template to render them, and not too many calls or characters.

    Args:
        field: the field of the request that has the messages.

    Raises:
        ApiError: one of the two is missing, or there are too many calls or characters.
    """
    if "messages" not in fields:
        raise invalid(field, "expected a list of messages, got nothing")
    if getattr(engine.tokenizer, "chat_template", "unknown") is None:
        raise invalid(field, "expected a model with a chat template, got one without; use /v1/completions with a text")
    calls = sum(len(message.get("tool_calls", ())) for message in fields["messages"])
    if calls > MAX_MESSAGES:  # as many results would be too many messages
        raise invalid(field, f"expected at most {MAX_MESSAGES} tool calls, got {calls}; leave earlier turns out")
    for name in ("messages", *TEMPLATE_OPTIONS):
        check_length(engine, field if name == "messages" else name, count_characters(fields.get(name)))


def check_length(engine: TextGenerator, field: str, size: int) -> None:
    """Refuse a text that has too many characters for its tokens to fit, before it is tokenised.

    Raises:
        ApiError: there are too many characters.
    """
    try:
        check_characters(field, size, engine.config.max_len)
    except ValueError as error:
        raise refused(error, {}) from error


def template_names(fields: dict[str, Any]) -> dict[str, str]:
    """Return the field of the request for each name that an error of the chat template may begin with."""
    variables = fields.get("chat_template_kwargs", {})
    return {"chat": "messages", "prompt": "messages"} | {name: f"chat_template_kwargs.{name}" for name in variables}


class ChatAnswer(Answer):
    """A request to /v1/chat/completions, and its answer."""

    table = CHAT
    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, service: Service, ask: Ask) -> None:
        check_conversation(service.engine, ask.own, self.prompt_field)
        ask.params.setdefault("max_tokens", None)  # as many as fit
        if ask.own.get("logprobs", False):
            ask.set("logprobs", {"logprobs": ask.own.get("top_logprobs", 0)})
        elif "top_logprobs" in ask.own:
            raise invalid("top_logprobs", "expected nothing without logprobs; set logprobs, or leave it out")
        self._template = template_of(service.engine.tokenizer)
        self._reasoning = reasoning.format_name(self._template, service.settings.reasoning_parser)
        self._reasoning = self._reasoning or service.engine.input_processor.thinking.format_name
        grammars = [str(ask.params[field]) for field in GRAMMARS if field in ask.params]
        self._reasons = service.settings.reasoning and may_reason(self._reasoning, grammars)
        self._choice = self._read_tools(service, ask)
        self._has_auto_grammar = is_needed(self._choice, ask.own.get("parallel_tool_calls"))
        super().__init__(service, ask)
        self.has_grammar |= self._has_auto_grammar
        self.names |= template_names(self.own) | ({"grammar": "tools"} if self._has_auto_grammar else {})
        self._messages: dict[int, ChatMessage] = {}  # of each choice, once the prompt is rendered

    def _read_tools(self, service: Service, ask: Ask) -> ToolChoice:
        """Read the tools and the choice among them, and set the fields of `SamplingParams` that they need."""
        fields = ask.own
        try:
            choice = read_choice(fields.get("tools"), fields.get("tool_choice"))
            parser_for(self._template, service.settings.tool_parser, choice, None)  # raises before the prompt is made
            grammar = tool_grammar(choice, fields.get("parallel_tool_calls"))
        except ValueError as error:
            raise refused(error, ask.names) from error
        if grammar is not None:
            ask.set("tool_choice", grammar)
        elif choice.mode == "auto":
            _check_alone(ask, has_grammar=is_needed(choice, fields.get("parallel_tool_calls")))
        if self._reasoning is not None or choice.mode != "none":
            ask.params["visible_special_tokens"] = MARKERS
        return choice

    def _auto_grammar(self, prompt: list[int]) -> str | None:
        specials = getattr(self.service.engine.tokenizer, "special_texts", {})
        shown = {text: token for text, token in specials.items() if text in MARKERS}
        format_name = format_of(self._template, self.service.settings.tool_parser)
        format_ = reasoning.FORMATS[self._reasoning] if self._reasons and self._reasoning is not None else None
        has_begun = format_ is not None and reasoning.begun_in(format_, *self._prompt_texts(prompt)) is not None
        is_parallel = self.own.get("parallel_tool_calls")
        return auto_grammar(self._choice, format_name, shown, is_parallel, format_, has_begun=has_begun)

    def _prompt_texts(self, prompt: Sequence[int]) -> tuple[str, str]:
        """Return the text of a prompt or of its end, and the beginning of the answer that it has."""
        tokenizer, prefill = self.service.engine.tokenizer, ""
        assert tokenizer is not None
        if self.own.get("continue_final_message"):
            prefill = self.own["messages"][-1].get("content") or ""
        return prompt_text(tokenizer, prompt, is_whole=prefill != ""), prefill

    def _parser(self, request: Request) -> OutputParser | None:
        """Return what splits the text of one completion of a request; None: all of it is content."""
        if self._choice.mode == "none" and not self._reasons:
            return None
        end, prefill = self._prompt_texts(request.prompt_token_ids)
        name, thought = self.service.settings.tool_parser, self._reasoning if self._reasons else None
        waits = request.thinking.grammar_waits
        return parser_for(self._template, name, self._choice, thought, prompt=end, prefill=prefill, grammar_waits=waits)

    def make_requests(self) -> list[Request]:
        ids = render(self.service.engine.tokenizer, self.own)
        if self._has_auto_grammar:
            self.params = replace(self.params, grammar=self._auto_grammar(ids))
        request = self.service.engine.prepare(ids, self.params, trace=self.is_traced)
        if request.thinking.grammar_waits:  # what it describes stands alone, even if reasoning is left in the content
            self._reasons = self._reasoning is not None
        self._messages = {index: ChatMessage(self._parser(request)) for index in range(self.n)}
        return [request]

    def body(self, outputs: Any) -> dict[str, Any]:
        scores = outputs[0][1].prompt_logprobs
        more: dict[str, Any] = {"prompt_token_ids": list(self.requests[0].prompt_token_ids)} if self.wants_ids else {}
        if "prompt_logprobs" in self.names and scores is not None:
            more["prompt_logprobs"] = prompt_entries(scores, self.service.texts)
        return {**super().body(outputs), **more}

    def usage(self) -> dict[str, Any]:
        details = {}
        if self._reasons:
            details["reasoning_tokens"] = sum(message.num_reasoning_tokens for message in self._messages.values())
        if self.params.prediction is not None:
            details |= prediction_details(self._metrics)
        return super().usage() | ({"completion_tokens_details": details} if details else {})

    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        message = self._messages[index]
        parts = message.parts(chunk)
        reasoning = "".join(part.reasoning for part in parts)
        content = "".join(part.content for part in parts)
        calls = whole_calls([part.call for part in parts if part.call is not None])
        body: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        body |= {"refusal": None}  # never one
        body |= {self.service.settings.reasoning_field: reasoning} if reasoning else {}
        body |= {"tool_calls": calls} if calls else {}
        return {"index": index, "message": body, **self._scores([chunk]), **self._end(message, chunk)}

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        message = self._messages[index]
        deltas = [self._delta(part) for part in message.parts(chunk)]
        if chunk.finish_reason is not None:
            deltas.append({})
        message.unsent.append(chunk)  # its log-probabilities wait if the parser holds its text back
        if not deltas:
            return []
        choices = [_choice(index, delta) for delta in deltas]
        choices[0] |= self._scores(message.unsent)
        message.unsent = []
        if chunk.finish_reason is not None:
            choices[-1] |= self._end(message, chunk)
        if not message.has_begun:
            message.has_begun = True
            choices.insert(0, _choice(index, {"role": "assistant", "content": ""}))
        return choices

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        if part.call is not None:
            return {"tool_calls": [call_delta(part.call)]}
        if part.reasoning:
            return {self.service.settings.reasoning_field: part.reasoning}
        return {"content": part.content}

    def _scores(self, chunks: list[Chunk]) -> dict[str, Any]:
        """Return the log-probabilities of chunks, and their token ids if the request asked for them."""
        entries = [entry for chunk in chunks for entry in chat_entries(chunk.logprobs or [], self.service.texts)]
        logprobs = None if self.params.logprobs is None else {"content": entries, "refusal": None}
        scores: dict[str, Any] = {"logprobs": logprobs}
        return scores | ({"token_ids": [t for chunk in chunks for t in chunk.token_ids]} if self.wants_ids else {})

    def _end(self, message: ChatMessage, chunk: Chunk) -> dict[str, Any]:
        reason = finish_reason(chunk)
        is_call = message.has_calls and not message.has_broken_call and reason == "stop"
        return {"finish_reason": "tool_calls" if is_call else reason, "stop_reason": stop_reason(chunk)}


def _check_alone(ask: Ask, *, has_grammar: bool) -> None:
    """Refuse a schema beside tools that the model need not call, and any grammar beside such tools with their own.

    Args:
        has_grammar: whether the tools have a grammar, because they are strict or may be called once.
    """
    refused_fields = GRAMMARS if has_grammar else ("json_schema",)
    field = next((ask.names[name] for name in refused_fields if name in ask.params), None)
    if field is not None:
        beside = "strict tools, or parallel_tool_calls false," if has_grammar else "tools"
        raise invalid(
            field,
            f"expected no schema or grammar beside {beside} that the model need not call; set tool_choice, or leave "
            "one out",
        )


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class ChatMessage:
    """One completion of a chat request while its text arrives.

    Args:
        parser: splits the text; None: all of it is content.

    Attributes:
        has_begun: whether a stream has sent its role.
        has_calls, has_broken_call: whether it calls a tool, and whether a call broke off.
        unsent: chunks whose log-probabilities no event has.
    """

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self.has_begun = self.has_calls = self.has_broken_call = False
        self.unsent: list[Chunk] = []
        self._ends = [0]  # numbers of characters before the first token and up to the end of each

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of its reasoning; some turn out to be reasoning after they came."""
        count = 0
        for span in self._parser.reasoning if self._parser else ():
            end = self._ends[-1] if span.end is None else span.end
            count += bisect_right(self._ends, end, 1) - bisect_right(self._ends, span.start, 1)
        return count

    def parts(self, chunk: Chunk) -> list[AnswerPart]:
        """Add new output; return its parts."""
        text = chunk.text or ""
        if self._parser is None:
            return [AnswerPart(content=text)] if text else []
        parts = self._parser.push(text)
        if chunk.finish_reason is not None:
            parts = [*parts, *self._parser.finish()]
        self.has_calls |= any(part.call is not None for part in parts)
        self.has_broken_call = self._parser.has_broken_call
        self._ends += accumulate(map(len, chunk.pieces or ()), initial=self._ends.pop())
        return parts
