"""The options of an engine, as a frozen record whose constructor checks their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jspec.core.accept_rule import AcceptRule
from jspec.core.foreign_names import names_checked
from jspec.core.shorten import short

if TYPE_CHECKING:  # host code imports this file, and runs without jax
    from jax.sharding import Mesh

ACCEPT_RULES = ("coupled", "rejection", "block", "traversal", "multi_candidate", "typical")
IMPLEMENTATIONS = ("auto", "pallas", "reference")
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
SPELLINGS = {  # other names of dtypes, as vLLM and torch have them; None: the default
    "auto": None,
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
QUANTIZE = ("int8", "fp8", "fp8_dynamic", "int4", "mxfp4")
DEQUANTIZE = "none"  # instead of a kind: widen the weights that a checkpoint quantises
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PREFILL_BUCKETS = (128, 512, 2048)
AHEAD_BUCKETS = (128, 512, 1024, 2048)  # with `compile_ahead`, when all are compiled side by side
MAX_INT = 2**31 - 1  # largest value of an option that counts; the device counts in int32
MAX_LOGPROBS = 20  # largest number of tokens per position whose log-probabilities are reported; vLLM's default limit


@names_checked()
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of an engine.

    Attributes: cache and memory
        slots: number of requests that may run at once.
        max_len: largest number of tokens of a request, prompt included; at most the target's
            max_position_embeddings.
        page_size: number of cache rows per page; a cache row holds the keys and values of one token.
        pages: number of pages per pool, the null page included. None: enough for every slot to reach ``max_len``; but
            if the device reports its memory, as many as fit. Then the limits are one request of ``max_len`` tokens, and
            ``slots`` such requests (with ``prefix_cache``, four times as many).
        memory_fraction: share of the device's memory that weights, pools, programs and the process's other arrays may
            use together.
        kv_dtype, draft_kv_dtype: dtypes of the target's and the drafter's pools, such as "float8_e4m3fn" or "fp8"; None
            or "auto": the weights' dtype.
        prefix_cache: share pages between requests that begin with the same tokens, even after a request has ended;
            changes no output.
        cached_states: number of texts whose recurrent states the prefix cache keeps, for targets that have such
            states; None: twice as many as ``slots``, since each request keeps those of its prompt and of its end. They
            are kept at multiples of 32 tokens at which a page ends, so pages above 32 tokens keep fewer.

    Attributes: schedule
        buckets: batch sizes of the compiled decode programs, ascending, ending at ``slots``; None: 1, 2, 4, ...
            ``slots`` with ``compile_ahead``, else 1 and ``slots``.
        prefill_buckets: numbers of tokens of the compiled prefill programs, ascending. A prefill takes as many waiting
            prompts as fit; a longer prompt needs several prefills.
        prefill_budget: largest number of prompt tokens to prefill between two decode steps while a running request
            waits for tokens; padding counts too. None: the largest of ``prefill_buckets``.
        rounds_per_dispatch: number of rounds (draft and verify once) that the device runs per dispatch.
        overlap: dispatch the next program before the last program's result is read; changes no output.

    Attributes: draft and accept rule
        accept: the accept rule, by name or as an object of `jspec.verify`; only "typical" changes the distribution of
            the emitted tokens. Its options are arguments of `jspec.verify.Typical`.
        draft_window: number of newest tokens that the drafter attends to; None: the drafter's own setting.
        predicted_tokens: largest number of tokens of a request's `prediction`, a text that its output will probably
            repeat. It needs a drafter with a look-up and accept="coupled", takes 4 bytes per slot and token, and costs
            some time in every round. 0: no request may have one.
        adaptive: before every dispatch, choose the draft depth from measured acceptance and cost. This needs
            accept="coupled", or another rule under which the emitted tokens do not depend on the draft
            (`jspec.core.accept_rule.AcceptRule.is_draft_independent`). With ``compile_ahead`` each program of a round
            runs five times without requests when the engine is made, to know its time.
        draft_depths: draft depths that ``adaptive`` chooses from, ascending, from 0 to the tree's depth. One program is
            compiled for each depth and bucket. None: 0, the tree's depth, and its repeated halves down to 1.
        draft_nodes: numbers of draft nodes per batch row that ``adaptive`` chooses from besides all nodes, ascending.
            With 8 or more rows, the batch then verifies only that many nodes per row on average, those with the highest
            draft probability among all rows. One program is compiled for each number and bucket. (): always all nodes.
            None: a half and a quarter of the tree's nodes.

    Attributes: requests
        controls: allow requests with penalties, logit_bias, bad_words, allowed_token_ids, min_tokens, a thinking budget
            or a grammar. This takes 8 bytes of memory per slot and vocabulary token, and takes time only in steps with
            such a request.
        grammar_cells: largest number of cells (states x token classes) of a grammar table; 0: no grammar tables. An
            engine with a tokenizer has one table per slot, with 2 bytes per cell and 2 bytes per vocabulary token.
        thinking_end: text of at most 64 tokens that ends the reasoning of a request whose thinking budget is used up.
            It ends with the end marker of a format of `jspec.engine.reading.reasoning`, such as </think>. None: this
            marker of the chat template's format alone.
        processor_args: number of values that a request may pass to the engine's ``logits_processor``.
        logprobs_mode: kind of log-probabilities reported for emitted tokens: "raw_logprobs" (the model's own) or
            "processed_logprobs" (after penalties, temperature, top-k, top-p and min-p; for greedy requests after
            penalties only). Log-probabilities of prompt tokens are always raw.
        seed: seed of the engine, from which it draws a seed for each request that has none.

    Attributes: adapters
        adapters: number of low-rank adapters (LoRA) of the target that running requests may have at once
            (`SamplingParams.adapter`, `Engine.load_adapter`); 0: none. Each takes device memory: at rank 16 in an 8B
            model 126 MB from four on, 285 MB alone.
        adapter_rank: largest rank of an adapter.

    Attributes: computation
        implementation: kernel implementation, "pallas" or "reference"; "auto" chooses Pallas on a GPU.
        quantize: quantisation of the target's matrix products: "int8", "fp8", "fp8_dynamic", "int4", or for experts
            alone "mxfp4" (`jspec.models.weights.quantize`); None: weights as loaded; "none": `Engine.from_pretrained`
            widens the weights that a Hugging Face folder quantises. The drafter has an option of its own.
        deterministic: emit exactly the same tokens for every drafter, tree, bucket, batch, slot, page size and
            division of the prompts into prefills, at temperature 0 or with a seed under "coupled". This takes more
            time, and needs weights that are not quantised. On a GPU layers with convolutions need weights of 16 bits,
            and those with gated delta nets compute capability 9.0.
        tensor_parallel: number of devices over which weights and KV pools are divided; the first devices are taken, or
            the first of each process (`jspec.distributed`), equally many. It must divide the numbers of query heads and
            of channels of the feed-forward; and the number of key-value heads, or be a multiple of it.
            `Engine.from_pretrained` reads a checkpoint part by part onto these devices.
        mesh: mesh of one axis named "model" over the devices to use instead, or over one device, on which the engine
            then runs; None: the first ``tensor_parallel``.
        compile_ahead: compile the programs of all buckets before the first request, so that no request waits for a
            compilation unless it is the first with log-probabilities, a trace or a host grammar; False: compile a
            program when a request first needs it. None: True on a GPU or TPU, False on a CPU.
        compile_cache: folder in which the whole process stores compiled programs from now on; None: the folder
            JAX_COMPILATION_CACHE_DIR if set, else a folder in the user's cache; False: store nothing.
        log_interval: seconds between log lines while requests run; None: no lines.

    Raises:
        ValueError: an option has an impossible value, or options contradict each other.
    """

    slots: int = 8
    max_len: int = 2048
    page_size: int = 16
    pages: int | None = None
    memory_fraction: float = 0.9
    kv_dtype: str | None = None
    draft_kv_dtype: str | None = None
    prefix_cache: bool = True
    cached_states: int | None = None

    buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    prefill_budget: int | None = None
    rounds_per_dispatch: int = 1
    overlap: bool = True

    accept: str | AcceptRule = "coupled"
    draft_window: int | None = None
    predicted_tokens: int = 0
    adaptive: bool = False
    draft_depths: tuple[int, ...] | None = None
    draft_nodes: tuple[int, ...] | None = None

    controls: bool = True
    grammar_cells: int = 2**18
    thinking_end: str | None = None
    processor_args: int = 0
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0

    adapters: int = 0
    adapter_rank: int = 16

    implementation: str = "auto"
    quantize: str | None = None
    deterministic: bool = False
    tensor_parallel: int = 1
    mesh: Mesh | None = None
    compile_ahead: bool | None = None
    compile_cache: str | Path | Literal[False] | None = None
    log_interval: float | None = 10.0

    def __post_init__(self) -> None:
        for name in ("kv_dtype", "draft_kv_dtype"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, SPELLINGS.get(getattr(self, name), getattr(self, name)))
        for name, (expected, is_valid) in CHECKS.items():
            value = getattr(self, name)
            if not is_valid(value):
                raise ValueError(f"{name}: expected {expected}, got {short(value)}")
        if self.deterministic and self.quantize in QUANTIZE:
            raise ValueError(f"deterministic: expected quantize=None, got {self.quantize!r}; set one of them only")
        self._check_adaptive()
        if self.compile_ahead is None:
            import jax

            object.__setattr__(self, "compile_ahead", jax.default_backend() != "cpu")
        self._set_buckets()

    def _check_adaptive(self) -> None:
        rule = self.accept
        is_independent = rule.is_draft_independent if isinstance(rule, AcceptRule) else rule == "coupled"
        if self.adaptive and not is_independent:
            raise ValueError(
                f'adaptive: expected accept="coupled", got {rule!r}, under which the tokens of a seed depend on '
                "the draft's depth; set adaptive=False"
            )
        if self.predicted_tokens and not is_independent:
            raise ValueError(
                f'predicted_tokens: expected accept="coupled", got {rule!r}, under which a prediction that is an '
                "earlier answer with the same seed would change the distribution; leave it out"
            )
        for name, least in {"draft_depths": 0, "draft_nodes": 1}.items():
            sizes = getattr(self, name)
            if sizes is not None and not self.adaptive:
                raise ValueError(f"{name}: expected None without adaptive=True, got {short(sizes)}")
            if sizes is not None and (name, sizes) != ("draft_nodes", ()):
                object.__setattr__(self, name, _ascending(name, sizes, least=least))
        if self.draft_depths is not None and self.draft_depths[0] != 0:
            raise ValueError(f"draft_depths: expected 0 first, which is no draft, got {short(self.draft_depths)}")

    def _set_buckets(self) -> None:
        rows = self.buckets
        if rows is None:
            powers = range((self.slots - 1).bit_length() if self.compile_ahead else min(self.slots - 1, 1))
            rows = (*(1 << i for i in powers), self.slots)
        rows = _ascending("buckets", rows)
        if rows[-1] != self.slots:
            raise ValueError(f"buckets: expected slots={self.slots} last, got {short(rows)}")
        tokens = self.prefill_buckets
        if tokens is None:
            sizes = AHEAD_BUCKETS if self.compile_ahead else PREFILL_BUCKETS
            fitting = [size for size in sizes if size < self.max_len]
            tokens = (*fitting, *sizes[len(fitting) : len(fitting) + 1])
        object.__setattr__(self, "buckets", rows)
        object.__setattr__(self, "prefill_buckets", _ascending("prefill_buckets", tokens))


Check = tuple[str, Callable[[Any], bool]]  # the expected value in words, and a function that tests a value


def _one_of(*allowed: object) -> Check:
    return f"one of {allowed}", lambda value: any(type(value) is type(each) and value == each for each in allowed)


def _int_from(least: int) -> Check:
    return f"an int from {least} to {MAX_INT}", lambda value: _is_int(value) and least <= value <= MAX_INT


def _none_or(check: Check) -> Check:
    text, is_valid = check
    return f"None or {text}", lambda value: value is None or is_valid(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_mesh(value: object) -> bool:
    from jax.sharding import Mesh

    return isinstance(value, Mesh) and value.axis_names == ("model",)


BOOL: Check = ("a bool", lambda value: isinstance(value, bool))
CHECKS: dict[str, Check] = {
    "slots": _int_from(1),
    "max_len": _int_from(1),
    "page_size": _int_from(1),
    "rounds_per_dispatch": _int_from(1),
    "accept": (
        f"one of {ACCEPT_RULES}",
        lambda value: isinstance(value, AcceptRule) or (isinstance(value, str) and value in ACCEPT_RULES),
    ),
    "implementation": _one_of(*IMPLEMENTATIONS),
    "logprobs_mode": _one_of(*LOGPROBS_MODES),
    "kv_dtype": _one_of(None, *KV_DTYPES),
    "draft_kv_dtype": _one_of(None, *KV_DTYPES),
    "quantize": _one_of(None, *QUANTIZE, DEQUANTIZE),
    "log_interval": ("None or seconds >= 0", lambda value: value is None or (_is_number(value) and value >= 0)),
    "memory_fraction": ("in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1),
    "adaptive": BOOL,
    "overlap": BOOL,
    "prefix_cache": BOOL,
    "controls": BOOL,
    "deterministic": BOOL,
    "tensor_parallel": _int_from(1),
    "mesh": (
        'None or a jax.sharding.Mesh of one axis named "model"',
        lambda value: value is None or _is_mesh(value),
    ),
    "compile_ahead": _one_of(None, True, False),
    "compile_cache": (
        "None, False or a folder's path",
        lambda value: value is None or value is False or isinstance(value, (str, Path)),
    ),
    "seed": ("an int >= 0", lambda value: _is_int(value) and value >= 0),
    "grammar_cells": _int_from(0),
    "thinking_end": ("None or a text", lambda value: value is None or (isinstance(value, str) and value != "")),
    "processor_args": _int_from(0),
    "predicted_tokens": _int_from(0),
    "adapters": _int_from(0),
    "adapter_rank": _int_from(1),
    "prefill_budget": _none_or(_int_from(1)),
    "cached_states": _none_or(_int_from(0)),
    "pages": _none_or(_int_from(2)),  # page 0 is never used
}


def _ascending(name: str, sizes: tuple[int, ...], *, least: int = 1) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
        raise ValueError(f"{name}: expected None or a tuple of ints, got {short(sizes)}")
    sizes = tuple(sizes)
    if not sizes or sizes[0] < least or sizes[-1] > MAX_INT or any(a >= b for a, b in pairwise(sizes)):
        kind = "positive sizes" if least else "sizes from 0"
        raise ValueError(f"{name}: expected ascending {kind}, at least one, got {short(sizes)}")
    return sizes
