"""What a parameter may be. No jax here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_LOGPROBS = 20  # likeliest tokens a place; vLLM's default limit


def is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def is_in(value: Any, least: Any, most: Any) -> bool:
    """Whether all are finite numbers and the value is from least to most."""
    return all(map(is_finite, (value, least, most))) and bool(least <= value <= most)


def are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(is_int(token) and token >= 0 for token in value)


def are_texts(value: object) -> bool:
    """Whether it is a tuple of texts, none empty."""
    return isinstance(value, tuple) and all(isinstance(text, str) and text != "" for text in value)


def is_bias(value: object) -> bool:
    """Whether it is None or gives token ids numbers of OpenAI's range."""
    if not isinstance(value, Mapping):
        return value is None
    return are_ids(tuple(value)) and all(is_in(bias, -100, 100) for bias in value.values())


def are_words(value: object) -> bool:
    """Whether it is a tuple of texts and of token ids, none empty."""
    if not isinstance(value, tuple):
        return False
    return all(word.strip() != "" if isinstance(word, str) else are_ids(word) and word != () for word in value)


def is_schema(value: object) -> bool:
    """Whether it is None, or a text or a mapping that can be written as JSON."""
    if not isinstance(value, Mapping):
        return value is None or isinstance(value, str)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
