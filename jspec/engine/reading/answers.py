"""Splits the answers to conversations into reasoning and the rest, in the format of the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from jspec.engine.reading import harmony, reasoning
from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.reasoning import HARMONY
from jspec.engine.reading.text_reader import AnswerPart, OutputParser, Reader, Reading, TextParser
from jspec.engine.request.request import Chunk, Completion
from jspec.engine.request.sampling_params import GRAMMARS, SamplingParams
from jspec.engine.text.tokenizer import Tokenizer

PROMPT_END = 64  # tokens of a prompt that tell whether it ends inside reasoning
MARKERS = (  # texts of the formats that may be special tokens
    *(marker for format_ in reasoning.FORMATS.values() for marker in ("<|channel>", *format_.markers)),
    *harmony.MARKERS,
)


def template_of(tokenizer: Tokenizer | None) -> str | None:
    """Return the chat template of a tokenizer, or all of several; None: there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, dict) else template


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int], *, is_whole: bool = False) -> str:
    """Return the text of a prompt with the markers of the formats, or its end, which tells how an answer begins."""
    shown = tokenizer.with_special_tokens(MARKERS) if tokenizer.hidden_ids else tokenizer
    return shown.decode(prompt if is_whole else prompt[-PROMPT_END:])


def may_reason(name: str | None, grammars: Iterable[str]) -> bool:
    """Return whether an answer may have reasoning of a format; a grammar leaves room for it if it has a marker."""
    texts = [grammar.replace("\\", "") for grammar in grammars]
    return name is not None and all(any(end in text for end in reasoning.FORMATS[name].closings) for text in texts)


def read(
    reader: Reader,
    calls: AnswerCalls,
    name: str | None,
    rest: Callable[[Reader, AnswerCalls], Reading[None]],
    *,
    prompt: str = "",
    prefill: str = "",
) -> Reading[None]:
    """Read an answer.

    Args:
        name: the format of reasoning that is split off; None: none is.
        rest: reads what follows the reasoning.
        prompt: the rendered prompt or its end, which tells whether the answer begins inside reasoning.
        prefill: the beginning of the answer, with which the prompt ends.
    """
    if rest is harmony.read or name == HARMONY:
        yield from harmony.read(reader, calls, prompt)
        return
    if name is not None:
        format_ = reasoning.FORMATS[name]
        yield from reasoning.read(reader, format_, begun=reasoning.begun_in(format_, prompt, prefill))
    yield from rest(reader, calls)


class ChatSplitter:
    """Splits the answers to one conversation of `Engine.chat`.

    Args:
        tokenizer: the engine's tokenizer.
        prompt: token ids of the rendered conversation.
        params: the parameters that the caller gives.
        template: the chat template, or the name of one of the tokenizer's; None: the tokenizer's.
        prefill: the beginning of the answer, with which the prompt ends.
        grammar_waits: whether the request's grammar begins after the reasoning.

    Attributes:
        params: the parameters of the request, whose answer shows the markers of the formats.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        params: SamplingParams,
        template: str | None = None,
        prefill: str = "",
        *,
        grammar_waits: bool = False,
    ) -> None:
        grammars = [grammar for field in GRAMMARS if (grammar := getattr(params, field)) is not None]
        has_text = template is not None and "{" in template
        name = reasoning.format_name(template if has_text else template_of(tokenizer))
        shows_markers = not tokenizer.hidden_ids or hasattr(tokenizer, "with_special_tokens")
        has_room = may_reason(name, () if grammar_waits else grammars)
        self._name = name if shows_markers and has_room else None
        self.params, self._prompt, self._prefill = params, "", prefill
        if self._name is not None:
            self._prompt = prompt_text(tokenizer, prompt, is_whole=prefill != "")
            self.params = replace(params, visible_special_tokens=(*params.visible_special_tokens, *MARKERS))

    def _parser(self) -> OutputParser:
        def read_answer(reader: Reader) -> Reading[None]:
            calls = AnswerCalls(reader, {})
            yield from read(reader, calls, self._name, _pass_all, prompt=self._prompt, prefill=self._prefill)

        return TextParser(read_answer)

    def split(self, text: str) -> tuple[str, str]:
        """Return the text of an answer without its reasoning, and the reasoning."""
        parser = self._parser()
        return _joined([*parser.push(text), *parser.finish()])

    def completed(self, done: Completion) -> Completion:
        """Return a completion and its others with the reasoning apart from the text."""
        if self._name is None:
            return done
        text, thought = self.split(done.text or "")
        return replace(done, text=text, reasoning=thought, others=tuple(map(self.completed, done.others)))

    def streamed(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield chunks with the reasoning apart from the text."""
        parsers: dict[int, OutputParser] = {}
        with closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                if self._name is not None:
                    parser = parsers.setdefault(chunk.index, self._parser())
                    parts = parser.push(chunk.text or "")
                    parts = [*parts, *(parser.finish() if chunk.finish_reason is not None else ())]
                    text, thought = _joined(parts)
                    chunk = replace(chunk, text=text, reasoning=thought)
                yield chunk


def _joined(parts: Sequence[AnswerPart]) -> tuple[str, str]:
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts)


def _pass_all(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    return reader.pass_all()
