"""The engine's options: frozen, checked when built."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ACCEPT_RULES = ("coupled", "rejection", "block", "multi_candidate", "typical")
IMPLEMENTATIONS = ("auto", "pallas", "reference")
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
QUANTIZE = ("int8", "fp8", "fp8_dynamic")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PREFILL_BUCKETS = (128, 512, 2048)
MAX_LOGPROBS = 20  # likeliest tokens reported per position; vLLM's default limit


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine.

    Attributes:
        slots: live requests.
        max_len: tokens a request may reach, prompt included.
        page_size: cache rows a page holds.
        buckets: rows of the compiled round programs, ascending, ending at ``slots``; None: 1, 2, 4, ... ``slots``.
        prefill_buckets: tokens of the compiled prefill programs, ascending; longer prompts go in chunks.
        pages: pages of the pools, the null page included; None: enough for every slot to reach ``max_len``; where the
            device reports its memory as many as fit, for one request of ``max_len`` at least, and with ``prefix_cache``
            up to four times as many.
        memory_fraction: share of the device's memory that weights, pools and programs may take, with all else that this
            process has there.
        implementation: of the kernels; "auto" takes Pallas on a GPU.
        rounds_per_dispatch: rounds that run on the device before the host hears of them.
        adaptive: choose before every dispatch how deep to draft, 0 included, by what was accepted and what it cost;
            with accept="coupled" alone, for there the tokens of a seed do not depend on the choice.
        draft_depths: to choose from, ascending from 0 to the depth of the drafter's tree; each is compiled for every
            bucket; None: that depth halved down to 1, and 0.
        overlap: dispatch the next step before the last one's result is read; the tokens are the same.
        accept: the accept rule; "typical" alone does not keep the target's distribution.
        typical_threshold, typical_alpha: "typical" accepts p(x) > min(threshold, alpha * exp(-entropy)).
        kv_dtype, draft_kv_dtype: of the pools; None: the weights' dtype.
        draft_window: tokens back that the drafter attends to, the newest included; None: as the drafter says.
        quantize: the target's products, "int8", "fp8" or "fp8_dynamic" (`jspec.models.quantize`); None: as the target
        is. The
            drafter has an option of its own.
        prefill_budget: tokens of prompts, in whole programs, that may come between two rounds while any running request
            may emit: so long do those that decode wait at most; None: the largest of ``prefill_buckets``.
        prefix_cache: requests that begin alike share pages, also with those that have ended; the tokens are the same.
        controls: serve requests with penalties, logit_bias, bad_words, allowed_token_ids, min_tokens or a grammar; that
            takes 8 bytes a slot and token of the vocabulary, and time only in rounds with such a request.
        grammar_cells: of a grammar's table, states times classes of tokens; an engine with a tokenizer has as many
            tables as slots, each of 2 bytes a cell and token of the vocabulary; 0: no grammars.
        processor_args: numbers that a request may give the engine's ``logits_processor``.
        logprobs_mode: of the tokens emitted: "raw_logprobs", the model's own, or "processed_logprobs", of the law that
            they are drawn from, behind controls, temperature, top-k, top-p and min-p (of a greedy request, behind the
            controls); those of prompts are raw.
        deterministic: what a request emits at temperature 0, or with a seed under accept="coupled", is bit for bit the
            same whatever the drafter, its tree, the bucket, the rest of the batch, slot, page size and chunks of the
            prompt: a token's logits are computed alike in every program, which takes longer. The target's weights must
            not be quantised.
        log_interval: seconds between the lines that `logging` gets while requests run; None: none.
        compile_cache: folder that keeps compiled programs for later processes, from now on those of the whole process;
            None: where JAX_COMPILATION_CACHE_DIR says, if anywhere.
        seed: from which requests without a seed draw theirs.
    """

    slots: int = 8
    max_len: int = 2048
    page_size: int = 16
    buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    pages: int | None = None
    memory_fraction: float = 0.9
    implementation: str = "auto"
    rounds_per_dispatch: int = 1
    adaptive: bool = False
    draft_depths: tuple[int, ...] | None = None
    overlap: bool = True
    accept: str = "coupled"
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    kv_dtype: str | None = None
    draft_kv_dtype: str | None = None
    draft_window: int | None = None
    quantize: str | None = None
    prefill_budget: int | None = None
    prefix_cache: bool = True
    controls: bool = True
    grammar_cells: int = 2**18
    processor_args: int = 0
    logprobs_mode: str = "raw_logprobs"
    deterministic: bool = False
    log_interval: float | None = 10.0
    compile_cache: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "max_len", "page_size", "rounds_per_dispatch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an int >= 1, got {value!r}")
        _one_of("accept", self.accept, ACCEPT_RULES)
        _one_of("implementation", self.implementation, IMPLEMENTATIONS)
        _one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        for name in ("kv_dtype", "draft_kv_dtype"):
            _one_of(name, getattr(self, name), (None, *KV_DTYPES))
        _one_of("quantize", self.quantize, (None, *QUANTIZE))
        for name in ("typical_threshold", "typical_alpha"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name}: expected a number > 0, got {value!r}")
        if self.log_interval is not None and not (_is_number(self.log_interval) and self.log_interval >= 0):
            raise ValueError(f"log_interval: expected None or seconds >= 0, got {self.log_interval!r}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction: expected in (0, 1], got {self.memory_fraction!r}")
        for name in ("adaptive", "overlap", "prefix_cache", "controls", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected a bool, got {getattr(self, name)!r}")
        if self.compile_cache is not None and not isinstance(self.compile_cache, (str, Path)):
            raise ValueError(f"compile_cache: expected None or a folder's path, got {self.compile_cache!r}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed: expected an int >= 0, got {self.seed!r}")
        for name in ("grammar_cells", "processor_args"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}: expected an int >= 0, got {value!r}")
        budget = self.prefill_budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise ValueError(f"prefill_budget: expected None or an int >= 1, got {budget!r}")
        if self.pages is not None and (not isinstance(self.pages, int) or self.pages < 2):
            raise ValueError(f"pages: expected None or an int >= 2 (page 0 is never used), got {self.pages!r}")
        if self.deterministic and self.quantize is not None:
            raise ValueError(f"deterministic: expected quantize=None, got {self.quantize!r}; set one of them only")
        self._check_adaptive()
        self._set_buckets()

    def _check_adaptive(self) -> None:
        if self.adaptive and self.accept != "coupled":
            raise ValueError(
                f'adaptive: expected accept="coupled", got {self.accept!r}, under which the tokens of a seed depend on '
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")


def _ascending(name: str, sizes: tuple[int, ...], *, least: int = 1) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
        raise ValueError(f"{name}: expected None or a tuple of ints, got {sizes!r}")
    sizes = tuple(sizes)
    if not sizes or sizes[0] < least or any(a >= b for a, b in pairwise(sizes)):
        kind = "positive sizes" if least else "sizes from 0"
        raise ValueError(f"{name}: expected ascending {kind}, at least one, got {sizes}")
    return sizes
