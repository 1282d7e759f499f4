"""Declares the options of an engine as typed keyword arguments, for editors and type checkers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from jspec.core.accept_rule import AcceptRule

if TYPE_CHECKING:
    from jax.sharding import Mesh


class EngineOptions(TypedDict, total=False):
    """A typed dict with the fields of `jspec.core.config.EngineConfig`, where each field is described.

    A test checks that names and types are equal.
    """

    slots: int
    max_len: int
    page_size: int
    pages: int | None
    memory_fraction: float
    kv_dtype: str | None
    draft_kv_dtype: str | None
    prefix_cache: bool
    cached_states: int | None
    buckets: tuple[int, ...] | None
    prefill_buckets: tuple[int, ...] | None
    prefill_budget: int | None
    rounds_per_dispatch: int
    overlap: bool
    accept: str | AcceptRule
    draft_window: int | None
    predicted_tokens: int
    adaptive: bool
    draft_depths: tuple[int, ...] | None
    draft_nodes: tuple[int, ...] | None
    controls: bool
    grammar_cells: int
    thinking_end: str | None
    processor_args: int
    logprobs_mode: str
    seed: int
    adapters: int
    adapter_rank: int
    implementation: str
    quantize: str | None
    deterministic: bool
    tensor_parallel: int
    mesh: Mesh | None
    compile_ahead: bool | None
    compile_cache: str | Path | Literal[False] | None
    log_interval: float | None
