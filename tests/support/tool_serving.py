"""A small engine whose chat template has tools and reasoning, as Qwen's does, for servers of `tests.support.serving`.

Its answers are random, so tests that need a certain answer ask for it with a regular expression.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pydantic

from jspec import Engine
from tests.support import costs, serving

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
