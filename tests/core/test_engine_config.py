"""Test that every option of the engine is checked and that errors name the field and its allowed values."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Any

import pytest

from jspec.core.config import CHECKS, EngineConfig
from jspec.verify import AcceptRule, Block, Coupled
from jspec.verify.rules import RULES

pytestmark = pytest.mark.once

CHECKED_ELSEWHERE = {
    "buckets",
    "prefill_buckets",
    "draft_depths",
    "draft_nodes",
    "draft_window",
}  # checked by methods of the config or by the drafter


def test_engine_config_fields_not_checked_elsewhere_are_in_the_table_of_checks() -> None:
    """Methods of the config or the drafter check the others."""
    assert {field.name for field in fields(EngineConfig)} == set(CHECKS) | CHECKED_ELSEWHERE


@pytest.mark.parametrize("name", CHECKS)
def test_engine_config_with_impossible_value_raises_naming_field_and_value(name: str) -> None:
    value: Any = "never" if name != "memory_fraction" else 1.5
    value = 3 if name in ("compile_cache", "thinking_end") else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value!r}$"):
        EngineConfig(**{name: value})


def test_adaptive_engine_config_takes_all_rules_whose_tokens_do_not_depend_on_the_draft() -> None:
    class Named(Block):  # type: ignore[misc]
        name = "coupled"

    class Independent(Block):  # type: ignore[misc]
        name = "independent"
        is_draft_independent = True

    rules: list[str | AcceptRule] = [*RULES, *(rule() for rule in RULES.values()), Named(), Independent()]
    taken = []
    for rule in rules:
        with contextlib.suppress(ValueError):
            taken.append(EngineConfig(adaptive=True, accept=rule).accept)
    assert taken == ["coupled", Coupled(), Independent()]


def test_engine_config_without_buckets_has_buckets_for_all_slots_and_max_len() -> None:
    config = EngineConfig(slots=6, max_len=600, compile_ahead=True)
    assert config.buckets == (1, 2, 4, 6)
    assert EngineConfig(slots=6, compile_ahead=False).buckets == (1, 6)
    assert config.prefill_buckets == (128, 512, 1024)
    assert EngineConfig(slots=6, max_len=600, compile_ahead=False).prefill_buckets == (128, 512, 2048)
    assert EngineConfig(slots=1, max_len=100).prefill_buckets == (128,)


@pytest.mark.parametrize("name", ["kv_dtype", "draft_kv_dtype"])
def test_cache_dtype_is_stored_under_one_name(name: str) -> None:
    """The spellings are those of vLLM's `kv_cache_dtype` and of torch."""
    spelled = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "half": "float16", "bf16": "bfloat16"}
    for other, stored in spelled.items():
        assert EngineConfig(**{name: other}) == EngineConfig(**{name: stored})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name}: expected one of .* got 'fp8_e5m2'"):
        EngineConfig(**{name: "fp8_e5m2"})  # type: ignore[arg-type]
