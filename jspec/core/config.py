"""The engine's options: one frozen record, checked when built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jspec.core.accept_rule import AcceptRule

ACCEPT_RULES = ("coupled", "rejection", "block", "multi_candidate", "typical")
IMPLEMENTATIONS = ("auto", "pallas", "reference")
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
QUANTIZE = ("int8", "fp8", "fp8_dynamic")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PREFILL_BUCKETS = (128, 512, 2048)
TYPICAL_OPTIONS = {"typical_threshold": 0.09, "typical_alpha": 0.3}
MAX_LOGPROBS = 20  # most tokens that log-probabilities are reported for per position; vLLM's default limit


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine.

    Attributes, cache and memory:
        slots: number of requests that may run at once.
        max_len: largest number of tokens of a request, prompt included; at most the target's max_position_embeddings.
        page_size: cache rows per page; a row holds the keys and values of one token.
        pages: pages per pool, the null page included. None: enough for every slot to reach ``max_len``; if the device
            reports its memory, as many as fit, at least enough for one request of ``max_len`` and at most enough for
            every slot, or four times that with ``prefix_cache``.
        memory_fraction: share of the device's memory that weights, pools, programs and the process's other arrays may
            use together.
        kv_dtype, draft_kv_dtype: dtypes of the target's and the drafter's pools; None: the weights' dtype.
        prefix_cache: share pages between requests, live or ended, that begin with the same tokens; changes no output.

    Attributes, schedule:
        buckets: batch sizes of the compiled decode programs, ascending, ending at ``slots``; None: 1, 2, 4, ...
            ``slots``.
        prefill_buckets: chunk lengths of the compiled prefill programs in tokens, ascending; a longer prompt is
            prefilled in several chunks.
        prefill_budget: most prompt tokens to prefill between two decode steps while a running request may emit, with
            chunks counted at their program's length; None: the largest of ``prefill_buckets``.
        rounds_per_dispatch: draft-verify rounds that the device runs per dispatch.
        overlap: dispatch the next program before the result of the last one is read; changes no output.

    Attributes, draft and accept rule:
        accept: the accept rule, by name or as an object of `jspec.verify`; only "typical" changes the distribution.
        typical_threshold, typical_alpha: options of accept="typical" (`jspec.verify.Typical`).
        draft_window: number of newest tokens that the drafter attends to; None: the drafter's own setting.
        adaptive: choose the draft depth before every dispatch by measured acceptance and cost; needs accept="coupled",
            under which the tokens emitted with a seed do not depend on the depth.
        draft_depths: draft depths that ``adaptive`` chooses from, ascending from 0 to the tree's depth, each compiled
            for every bucket; None: the tree's depth halved down to 1, and 0.

    Attributes, requests:
        controls: serve requests with penalties, logit_bias, bad_words, allowed_token_ids, min_tokens or a grammar;
            costs 8 bytes per slot and vocabulary token, and time only in steps with such a request.
        grammar_cells: largest number of cells (states x token classes) of a grammar table; an engine with a tokenizer
            has one table per slot, with 2 bytes per cell and 2 bytes per vocabulary token; 0: no grammar tables.
        processor_args: number of values that a request may pass to the engine's ``logits_processor``.
        logprobs_mode: kind of log-probabilities reported for emitted tokens: "raw_logprobs" (the model's own) or
            "processed_logprobs" (after penalties, temperature, top-k, top-p and min-p; for greedy requests after
            penalties only). Those of prompt tokens are always raw.
        seed: seed of the engine, from which requests without a seed draw their own.

    Attributes, computation:
        implementation: kernel implementation, "pallas" or "reference"; "auto" chooses Pallas on a GPU.
        quantize: quantisation of the target's matrix products: "int8", "fp8" or "fp8_dynamic"
            (`jspec.models.quantize`); None: weights as loaded. The drafter has an option of its own.
        deterministic: a request's tokens at temperature 0, or with a seed under "coupled", are bit for bit the same for
            every drafter, tree, bucket, batch, slot, page size and chunking, at some cost in time; needs weights that
            are not quantised.
        compile_cache: folder in which the whole process stores compiled programs from now on; None: the folder
            JAX_COMPILATION_CACHE_DIR, if set.
        log_interval: seconds between log lines while requests run; None: no lines.

    Raises:
        ValueError: an option with an impossible value, or options that do not fit together.
    """

    slots: int = 8
    max_len: int = 2048
    page_size: int = 16
    pages: int | None = None
    memory_fraction: float = 0.9
    kv_dtype: str | None = None
    draft_kv_dtype: str | None = None
    prefix_cache: bool = True

    buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    prefill_budget: int | None = None
    rounds_per_dispatch: int = 1
    overlap: bool = True

    accept: str | AcceptRule = "coupled"
    typical_threshold: float = TYPICAL_OPTIONS["typical_threshold"]
    typical_alpha: float = TYPICAL_OPTIONS["typical_alpha"]
    draft_window: int | None = None
    adaptive: bool = False
    draft_depths: tuple[int, ...] | None = None

    controls: bool = True
    grammar_cells: int = 2**18
    processor_args: int = 0
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0

    implementation: str = "auto"
    quantize: str | None = None
    deterministic: bool = False
    compile_cache: str | Path | None = None
    log_interval: float | None = 10.0

    def __post_init__(self) -> None:
        for name, (expected, is_valid) in CHECKS.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(f"{name}: expected {expected}, got {value!r}")
        if self.deterministic and self.quantize is not None:
            raise ValueError(f"deterministic: expected quantize=None, got {self.quantize!r}; set one of them only")
        self._check_typical()
        self._check_adaptive()
        self._set_buckets()

    @property
    def accept_options(self) -> dict[str, float]:
        """Options to pass to `jspec.verify.resolve` with the name in ``accept``: those of "typical", else none."""
        is_typical = self.accept == "typical"
        return dict(threshold=self.typical_threshold, alpha=self.typical_alpha) if is_typical else {}

    def _check_typical(self) -> None:
        for name, default in TYPICAL_OPTIONS.items():
            if isinstance(self.accept, AcceptRule) and getattr(self, name) != default:
                raise ValueError(
                    f"{name}: expected it in the rule, accept=Typical(threshold, alpha), got {getattr(self, name)!r} "
                    f"beside accept={self.accept}; leave it out"
                )

    def _check_adaptive(self) -> None:
        accept = self.accept.name if isinstance(self.accept, AcceptRule) else self.accept
        if self.adaptive and accept != "coupled":
            raise ValueError(
                f'adaptive: expected accept="coupled", got {accept!r}, under which the tokens of a seed depend on '
                "the draft's depth; set adaptive=False"
            )
        if self.draft_depths is None:
            return
        if not self.adaptive:
            raise ValueError(f"draft_depths: expected None without adaptive=True, got {self.draft_depths!r}")
        depths = _ascending("draft_depths", self.draft_depths, least=0)
        if depths[0] != 0:
            raise ValueError(f"draft_depths: the first must be 0, which is no draft, got {depths}")
        object.__setattr__(self, "draft_depths", depths)

    def _set_buckets(self) -> None:
        rows = self.buckets
        if rows is None:
            rows = (*(1 << i for i in range((self.slots - 1).bit_length())), self.slots)
        rows = _ascending("buckets", rows)
        if rows[-1] != self.slots:
            raise ValueError(f"buckets: the last must be slots={self.slots}, got {rows}")
        tokens = self.prefill_buckets
        if tokens is None:
            fitting = [size for size in PREFILL_BUCKETS if size < self.max_len]
            tokens = (*fitting, *PREFILL_BUCKETS[len(fitting) : len(fitting) + 1])
        object.__setattr__(self, "buckets", rows)
        object.__setattr__(self, "prefill_buckets", _ascending("prefill_buckets", tokens))


Check = tuple[str, Callable[[Any], bool]]  # the expected value in words, and the test of a value


def _one_of(*allowed: object) -> Check:
    return f"one of {allowed}", lambda value: value in allowed


def _int_from(least: int) -> Check:
    return f"an int >= {least}", lambda value: _is_int(value) and value >= least


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


BOOL: Check = ("a bool", lambda value: isinstance(value, bool))
POSITIVE: Check = ("a number > 0", lambda value: isinstance(value, (int, float)) and value > 0)
CHECKS: dict[str, Check] = {
    "slots": _int_from(1),
    "max_len": _int_from(1),
    "page_size": _int_from(1),
    "rounds_per_dispatch": _int_from(1),
    "accept": (f"one of {ACCEPT_RULES}", lambda value: isinstance(value, AcceptRule) or value in ACCEPT_RULES),
    "implementation": _one_of(*IMPLEMENTATIONS),
    "logprobs_mode": _one_of(*LOGPROBS_MODES),
    "kv_dtype": _one_of(None, *KV_DTYPES),
    "draft_kv_dtype": _one_of(None, *KV_DTYPES),
    "quantize": _one_of(None, *QUANTIZE),
    "typical_threshold": POSITIVE,
    "typical_alpha": POSITIVE,
    "log_interval": ("None or seconds >= 0", lambda value: value is None or (_is_number(value) and value >= 0)),
    "memory_fraction": ("in (0, 1]", lambda value: 0 < value <= 1),
    "adaptive": BOOL,
    "overlap": BOOL,
    "prefix_cache": BOOL,
    "controls": BOOL,
    "deterministic": BOOL,
    "compile_cache": ("None or a folder's path", lambda value: value is None or isinstance(value, (str, Path))),
    "seed": ("an int >= 0", lambda value: isinstance(value, int) and value >= 0),
    "grammar_cells": _int_from(0),
    "processor_args": _int_from(0),
    "prefill_budget": ("None or an int >= 1", lambda value: value is None or (_is_int(value) and value >= 1)),
    "pages": (
        "None or an int >= 2 (page 0 is never used)",
        lambda value: value is None or (isinstance(value, int) and value >= 2),
    ),
}


def _ascending(name: str, sizes: tuple[int, ...], *, least: int = 1) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
        raise ValueError(f"{name}: expected None or a tuple of ints, got {sizes!r}")
    sizes = tuple(sizes)
    if not sizes or sizes[0] < least or any(a >= b for a, b in pairwise(sizes)):
        kind = "positive sizes" if least else "sizes from 0"
        raise ValueError(f"{name}: expected ascending {kind}, at least one, got {sizes}")
    return sizes
