"""Reads the prompts and parameters that callers give, in all accepted forms."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from itertools import islice
from numbers import Number
from typing import Any, Protocol

from jspec.core.foreign_names import check_names
from jspec.core.shorten import short
from jspec.engine.request.sampling_params import SamplingParams


class IdArray(Protocol):
    """An array of token ids: of numpy, jax or torch."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | IdArray | Mapping[str, Any]
Prompts = Prompt | Iterable[Any]  # items are `Prompt`; no narrower type fits a list of texts and ids
Params = SamplingParams | Mapping[str, Any]

A_PROMPT = "a text or a list of int token ids"
PARAMETERS = tuple(field.name for field in fields(SamplingParams))
MAX_ITEMS = 2**22  # most prompts, and most tokens of a prompt, that are read; an iterator may have no end
PROMPT_KEYS = ("prompt", "prompt_token_ids")  # of a prompt as a dict, as in vLLM


def read_prompts(prompts: Any) -> list[str | tuple[int, ...]]:
    """Read one prompt or several.

    Args:
        prompts: a text, token ids in a sequence or an array of one axis, a dict with "prompt" or "prompt_token_ids",
            an iterable of these, or an array of ids ``[prompts, tokens]``.

    Returns:
        The prompts in order, each a text or a tuple of ids. The ids are ints, not checked further.

    Raises:
        TypeError, ValueError: a value has a wrong type; the error names the prompt by its index.
    """
    values = read_items(prompts)
    if values is None or (values and _is_number(values[0])):
        return [read_prompt(prompts if values is None else values, "prompt")]
    name = "prompt" if len(values) == 1 else "prompts[{}]"
    return [read_prompt(value, name.format(index)) for index, value in enumerate(values)]


def read_prompt(prompt: Any, name: str = "prompt") -> str | tuple[int, ...]:
    """Read one prompt.

    The prompt may have the forms that `read_prompts` lists for one prompt; ``name`` is its name in errors.
    """
    if isinstance(prompt, Mapping):
        keys = [key for key in PROMPT_KEYS if key in prompt]
        if len(keys) != 1 or len(prompt) != 1:
            raise ValueError(
                f'{name}: expected a dict with "prompt" or "prompt_token_ids" alone, got the keys '
                f"{short(list(prompt))}; give the text or the token ids"
            )
        prompt = prompt[keys[0]]
        if isinstance(prompt, str) != (keys[0] == "prompt"):
            raise TypeError(f"{name}: expected a text in prompt or ids in prompt_token_ids, got {short(prompt)}")
    if isinstance(prompt, str):
        return prompt
    values = read_items(prompt)
    if values is None:
        raise TypeError(f"{name}: expected {A_PROMPT}, got {short(prompt)}{_remedy(prompt)}")
    return tuple(_token_id(value, prompt, name) for value in values)


def read_items(value: Any) -> list[Any] | None:
    """Return the items of an iterable or of an array with axes; None for texts, bytes, dicts, sets and other values."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, AbstractSet)) or _is_number(value):
        return None
    if hasattr(value, "tolist") and hasattr(value, "ndim"):
        return list(value.tolist())
    if not isinstance(value, Iterable) or isinstance(value, type):
        return None
    items = list(islice(value, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise ValueError(f"expected at most {MAX_ITEMS} prompts, tokens or ids at once, got more in {short(value)}")
    return items


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or of an array library."""
    return isinstance(value, Number) or getattr(value, "ndim", None) == 0


def _token_id(value: Any, prompt: Any, name: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected int token ids, got {short(value)} in {short(prompt)}{_remedy(value)}") from None


def _remedy(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; decode it, as in prompt.decode()"
    if isinstance(value, AbstractSet):
        return "; a set has no order, so give a list"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"; a prompt of one token is [{short(value)}]"
    if isinstance(value, (str, list, tuple)) or (hasattr(value, "ndim") and value.ndim):
        return "; give one prompt here, and several to generate"
    return ""


def read_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Read token ids from an iterable or an array.

    ``name`` is the argument's name in the error.

    Raises:
        TypeError: ``ids`` is something else.
    """
    values = read_items(ids)
    if values is None:
        raise TypeError(f"{name}: expected a list of int token ids, got {short(ids)}")
    return tuple(_token_id(value, ids, name) for value in values)


def read_params(
    params: Any, count: int, *, sampling_params: Any = None, keywords: Mapping[str, Any] | None = None
) -> list[SamplingParams]:
    """Read the parameters of ``count`` prompts.

    Args:
        params: a `SamplingParams`, a dict of its fields, or an iterable with a `SamplingParams` or dict for each
            prompt; None: defaults.
        count: number of prompts.
        sampling_params: another name of ``params``; give at most one of the two.
        keywords: fields of one `SamplingParams`, instead of ``params``.

    Raises:
        TypeError, ValueError: a value has a wrong type, a field is unknown or wrong, or the iterable has not ``count``
            items.
    """
    sources = [value for value in (params, sampling_params, keywords or None) if value is not None]
    if len(sources) > 1:
        raise TypeError(
            "params: expected one of params, sampling_params= and single fields such as max_tokens=, got "
            f"{len(sources)} of them; put all fields into one SamplingParams"
        )
    value = sources[0] if sources else SamplingParams()
    if isinstance(value, (SamplingParams, Mapping)):
        return [_one_params(value)] * count
    values = read_items(value)
    if values is None:
        raise TypeError(f"params: expected SamplingParams, a dict of its fields or a list of these, got {short(value)}")
    if len(values) != count:
        number = "one" if count == 1 else f"one or {count}, one a prompt"
        raise ValueError(f"params: expected {number}, got {len(values)}")
    return [_one_params(value) for value in values]


def _one_params(value: Any) -> SamplingParams:
    if isinstance(value, SamplingParams):
        return value
    if isinstance(value, Mapping):
        check_names("SamplingParams", value, PARAMETERS)
        return SamplingParams(**value)
    raise TypeError(f"params: expected SamplingParams or a dict of its fields, got {short(value)}")
