"""Formats of reasoning between two markers: how a chat template or a name chooses one, and how it is split off."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.core.shorten import short
from jspec.engine.reading.json_scanner import BLANKS
from jspec.engine.reading.text_reader import Reader, Reading


@dataclass(frozen=True)
class ReasoningFormat:
    """How the answers of a model family mark their reasoning.

    Attributes:
        openings: markers with which reasoning begins, in the answer or at the prompt's end; longer ones first.
        closings: markers with which it ends.
        signs: texts of which the chat template has one.
        answer: markers around the answer that follows the reasoning, if the family writes any.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    signs: tuple[str, ...]
    answer: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers, which may be special tokens."""
        return (*self.openings, *self.closings)


def _pair(opening: str, closing: str, *signs: str, answer: tuple[str, str] | None = None) -> ReasoningFormat:
    return ReasoningFormat((opening,), (closing,), signs or (opening, closing), answer)


HARMONY = "harmony"  # whose messages `jspec.engine.reading.harmony` reads
FORMATS = {  # by name; of several whose signs a chat template has, the first one counts
    HARMONY: _pair("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>"),  # gpt-oss
    "gemma4": _pair("<|channel>thought", "<channel|>"),
    "seed_oss": ReasoningFormat(
        # With a budget of 0 the prompt also begins the remark on the budget, which is part of the reasoning.
        ("<seed:think><seed:cot_budget_reflect>", "<seed:think>"),
        ("</seed:think>",),
        ("<seed:think>",),
    ),
    "mistral": _pair("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    "granite": ReasoningFormat(  # Granite 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:",),
    ),
    "granite_tags": _pair(
        "<think>", "</think>", "<response></response>", answer=("<response>", "</response>")
    ),  # Granite 3.3
    "think": _pair("<think>", "</think>"),
}
THINK = ("deepseek_r1", "deepseek_v3", "glm45", "glm47", "kimi_k2", "olmo3", "qwen3", "qwen3_thinking")
ALIASES = dict.fromkeys(THINK, "think") | dict.fromkeys(("openai_gptoss", "gpt_oss"), HARMONY)  # names of other servers


def format_name(chat_template: str | None, name: str | None = None) -> str | None:
    """Return the name of the format of reasoning that a chat template has, or that another name means; None: none.

    Raises:
        ValueError: there is no format of this name.
    """
    if name is None:
        text = chat_template or ""
        return next((key for key, format_ in FORMATS.items() if any(sign in text for sign in format_.signs)), None)
    plain = name.replace("-", "_")
    if (known := ALIASES.get(plain, plain)) not in FORMATS:
        raise ValueError(f"reasoning_parser: expected one of {', '.join(FORMATS)}, got {short(name)}")
    return known


def is_used_by(chat_template: str | None) -> bool:
    """Return whether a chat template is that of a model that reasons in one of the formats."""
    return format_name(chat_template) is not None


def begun_in(format_: ReasoningFormat, prompt: str, prefill: str = "") -> str | None:
    """Return the reasoning that a prompt has begun, so far; None: the answer begins outside reasoning.

    Args:
        prompt: the rendered prompt, or its end.
        prefill: the beginning of the answer, with which the prompt ends.
    """
    opened = max((prefill.rfind(text) + len(text) for text in format_.openings if text in prefill), default=-1)
    closed = max(prefill.rfind(text) for text in format_.closings)
    if max(opened, closed) >= 0:
        return prefill[opened:] if opened > closed else None
    head = prompt.rstrip(BLANKS).removesuffix(prefill.strip(BLANKS)).rstrip(BLANKS)
    return prefill if head.endswith(format_.openings) else None


def read(reader: Reader, format_: ReasoningFormat, *, begun: str | None = None) -> Reading[None]:
    """Pass on the reasoning with which an answer begins; leave the rest to be read.

    Blanks beside the markers are dropped. Markers at other places are text.

    Args:
        begun: the reasoning that the prompt has begun; None: it has begun none. If it has no text yet, the answer may
            repeat the opening marker.
    """
    if not (begun or "").strip(BLANKS):
        yield from reader.skip_blanks()
        if not (yield from reader.take_one(format_.openings)) and begun is None:
            reader.at = 0
            return
        yield from reader.skip_blanks()
    reader.begin_reasoning()
    reader.commit()
    if not (yield from reader.pass_until(*format_.closings, is_reasoning=True)):
        return
    yield from reader.end_reasoning()
    if format_.answer is not None and (yield from reader.take(format_.answer[0])):
        yield from reader.skip_blanks()
        reader.commit()
        yield from reader.pass_until(format_.answer[1])
        reader.commit()
