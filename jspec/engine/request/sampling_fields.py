"""The parameters of a request as keyword arguments, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class SamplingFields(TypedDict, total=False):
    """The fields of `jspec.engine.request.sampling_params.SamplingParams`, which describes them."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    bad_words: tuple[str | tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None
    min_tokens: int
    regex: str | None
    json_schema: str | Mapping[str, Any] | type | None
    grammar: str | None
    thinking_budget: int | None
    prediction: str | tuple[int, ...] | None
    adapter: str | None
    processor_args: tuple[float, ...]
    skip_special_tokens: bool
    visible_special_tokens: tuple[str, ...]
    draft: bool | int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    n: int
