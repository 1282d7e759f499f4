"""A small engine whose chat template has tools and reasoning, as Qwen's does, for servers of `tests.support.serving`.

Its answers are random, so tests that need a certain answer ask for it with a regular expression.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pydantic
import pytest

from jspec import Engine
from jspec.engine.reading import harmony
from tests.support import costs, paper_model, serving
from tests.support.answers import split

TEMPLATE = """{% if tools %}<|im_start|>tools {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{
call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}{% endif %}"""


@cache
@costs.shared()
def engine() -> Engine:
    """Return an engine on a device of paper."""
    return serving.small_engine(serving.SLOTS, serving.MAX_LEN, TEMPLATE)


HARMONY = """{% for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
SPECIALS = (*harmony.MARKERS, "[THINK]", "[/THINK]", "<|other|>")


@cache
@costs.shared()
def special_engine(template: str = HARMONY) -> Engine:
    """Return an engine on a device of paper, the markers of whose formats are special tokens."""
    return serving.small_engine(serving.SLOTS, serving.MAX_LEN, template, SPECIALS)


@contextlib.contextmanager
def telling(engine: Engine, text: str, cuts: Sequence[int] = ()) -> Iterator[list[int]]:
    """Let every answer of an engine on a device of paper be a text, special tokens included, and then end.

    Where a grammar does not allow the next token, the likeliest allowed one takes its place. The context's value is the
    tokens of the answers.

    Args:
        engine: the engine.
        text: the answers.
        cuts: characters at which a token begins in any case, even inside a marker.
    """
    assert engine.tokenizer is not None
    pieces = [engine.tokenizer.encode(piece, add_special_tokens=False) for piece in split(text, cuts)]
    ids = [*itertools.chain(*pieces), engine.eos_ids[0]]

    def told(logits: Any, position: int, piece: Any) -> int:
        token = ids[min(position - int(piece["start"] + piece["count"]), len(ids) - 1)]
        return token if np.isfinite(logits[token]) else int(np.argmax(logits))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paper_model, "sample", told)
        yield ids


def saying(text: str) -> dict[str, Any]:
    """Return the field of a request whose answer is this text."""
    return {"structured_outputs": {"regex": re.escape(text).replace("\\ ", " ").replace("\\\n", "\n")}}


def check_types(answer: Any) -> None:
    """Check that a client's answer has values of the types that the client declares, and no other fields, throughout.

    Clients build their answers without checks.

    Args:
        answer: an object of one of the client's pydantic classes.
    """
    type(answer).model_validate(answer.to_dict())
    _check_names(answer)


def _check_names(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        value = [getattr(value, name) for name in type(value).model_fields]
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_names(one)
