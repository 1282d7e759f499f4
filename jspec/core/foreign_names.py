"""Refuses unknown keyword arguments; the error names jspec's keyword if another library's was given."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from jspec.core.shorten import short

ONE_MESH = "tensor_parallel=, the number of devices over which weights are divided; layers are not divided"
REPLICAS = "jspec.Replicas(lambda mesh: Engine(..., mesh=mesh), devices), which runs an engine on each device"
NO_BEAMS = "no such option, because jspec has no beam search"
ADAPTERS = "adapters=, the number of adapters that running requests may have at once"
NO_OFFLOAD = "no such option, because weights and caches stay on the devices"
NO_PADDING = "no such option, because batches need no padding"
DRAFTER = 'drafter=, such as drafter="ngram", drafter="path/of/head" or drafter=jspec.Eagle3.from_pretrained(path)'
CHAIN = "the tree of the drafter, such as tree=jspec.Tree.chain(4)"
TOPK = "the tree of the drafter, such as tree=jspec.Tree.topk(nodes=60, depth=8, k=10)"
DRAFT_DEVICES = (
    "device= of DraftModel, devices other than the target's; without it the drafter is divided as the target is"
)
TEMPLATE = 'chat_template_kwargs= of Engine.chat, such as chat_template_kwargs={"enable_thinking": False}'
TYPICAL = "accept=, such as accept=jspec.verify.Typical(0.09, 0.3)"
GRAMMARS = "json_schema=, regex= or grammar="
PROMPTS = "the prompts as the first argument"

# Keyword arguments of vLLM, SGLang, transformers, OpenAI and earlier versions of jspec, and what jspec expects instead.
FOREIGN_NAMES: dict[str, str] = {
    # engines: memory and schedule
    "max_model_len": "max_len=",
    "max_seq_len": "max_len=",
    "n_ctx": "max_len=",
    "context_length": "max_len=",
    "max_num_seqs": "slots=",
    "max_running_requests": "slots=",
    "batch_size": "slots=",
    "gpu_memory_utilization": "memory_fraction=",
    "mem_fraction_static": "memory_fraction=",
    "block_size": "page_size=",
    "num_gpu_blocks_override": "pages=",
    "enable_prefix_caching": "prefix_cache=",
    "disable_radix_cache": "prefix_cache=False",
    "kv_cache_dtype": "kv_dtype=",
    "swap_space": NO_OFFLOAD,
    "cpu_offload_gb": NO_OFFLOAD,
    "n_gpu_layers": NO_OFFLOAD,
    "max_num_batched_tokens": "prefill_budget=",
    "chunked_prefill_size": "prefill_budget=",
    "enable_chunked_prefill": "prefill_buckets=, because long prompts always run in several prefills",
    "num_scheduler_steps": "rounds_per_dispatch=",
    "tensor_parallel_size": "tensor_parallel=",
    "tp_size": "tensor_parallel=",
    "pipeline_parallel_size": ONE_MESH,
    "data_parallel_size": REPLICAS,
    "dp_size": REPLICAS,
    "device_map": "mesh=, a jax.sharding.Mesh, or tensor_parallel=",
    # engines: weights and computation
    "torch_dtype": "dtype= of Engine.from_pretrained",
    "quantization": "quantize=",
    "quantization_config": "quantize=",
    "load_in_8bit": 'quantize="int8"',
    "attention_backend": "implementation=",
    "attn_implementation": "implementation=",
    "enforce_eager": "compile_ahead=, because programs are always compiled",
    "disable_cuda_graph": "compile_ahead=, because programs are always compiled",
    **dict.fromkeys(("enable_lora", "max_loras", "max_loras_per_batch", "max_cpu_loras"), ADAPTERS),
    "max_lora_rank": "adapter_rank=",
    **dict.fromkeys(("lora_modules", "lora_paths"), "Engine.load_adapter(name, path)"),
    **dict.fromkeys(("lora_request", "lora_path", "lora_name"), "adapter= of a request, the name of a loaded adapter"),
    "revision": 'no such option, because the path names it, as in "owner/name@revision"',
    "trust_remote_code": "no such option, because code from a checkpoint is never run",
    "random_seed": "seed=",
    "disable_log_stats": "log_interval=None",
    "logits_processors": "logits_processor= of Engine",
    # engines: drafting
    "speculative_config": DRAFTER,
    "speculative_algorithm": DRAFTER,
    "draft_tensor_parallel_size": DRAFT_DEVICES,
    "speculative_draft_tensor_parallel_size": DRAFT_DEVICES,
    "speculative_model": DRAFTER,
    "speculative_draft_model_path": DRAFTER,
    "assistant_model": DRAFTER,
    "draft_model": DRAFTER,
    "num_speculative_tokens": CHAIN,
    "num_assistant_tokens": CHAIN,
    "speculative_num_steps": CHAIN,
    "speculative_num_draft_tokens": TOPK,
    "speculative_eagle_topk": TOPK,
    "prompt_lookup_num_tokens": 'drafter=jspec.NGram("chain:4")',
    "prompt_lookup_max": "drafter=jspec.NGram(max_n=4)",
    "prompt_lookup_min": "drafter=jspec.NGram(min_n=1)",
    "typical_threshold": TYPICAL,
    "typical_alpha": TYPICAL,
    "per_request_spec_decode_metrics": "no such option, because completions always have metrics, and answers of the "
    'server if a request has "jspec": {"metrics": true}',
    # requests
    "max_new_tokens": "max_tokens=",
    "max_completion_tokens": "max_tokens=",
    "max_length": "max_tokens=",
    "n_predict": "max_tokens=",
    "min_new_tokens": "min_tokens=",
    "min_length": "min_tokens=",
    "do_sample": "temperature=, 0 for greedy decoding",
    "num_return_sequences": "n=",
    "best_of": "n=, and your own choice among Completion.samples",
    "num_beams": NO_BEAMS,
    "use_beam_search": NO_BEAMS,
    "beam_width": NO_BEAMS,
    "length_penalty": NO_BEAMS,
    "early_stopping": NO_BEAMS,
    "no_repeat_ngram_size": "frequency_penalty= or repetition_penalty=",
    "include_stop_str_in_output": "no such option, because the text never has the stop string; stop_reason names it",
    "return_full_text": "no such option, because the text never has the prompt; prompt_token_ids has it",
    "detokenize": "no such option, because texts and token_ids are always made",
    "guided_json": "json_schema=",
    "guided_regex": "regex=",
    "guided_grammar": "grammar=",
    "guided_choice": 'regex=, such as regex="yes|no"',
    "guided_decoding": GRAMMARS,
    "structured_outputs": GRAMMARS,
    "response_format": GRAMMARS,
    "ebnf": "grammar=",
    "stop_strings": "stop=",
    "stop_sequences": "stop=",
    "stop_words": "stop=",
    "eos_token_id": "stop_token_ids= of a request, or eos_ids= of the engine",
    "pad_token_id": NO_PADDING,
    "attention_mask": NO_PADDING,
    "padding": NO_PADDING,
    "return_logprob": "logprobs=",
    "top_logprobs": "logprobs=",
    "output_scores": "logprobs=",
    "sampling_seed": "seed=",
    "use_tqdm": "progress=",
    "streamer": "Engine.stream",
    **dict.fromkeys(("thinking_token_budget", "max_thinking_tokens", "budget_tokens"), "thinking_budget="),
    **dict.fromkeys(
        ("reasoning_budget", "reasoning_config"), "thinking_budget= of a request, and thinking_end= of Engine"
    ),
    "enable_thinking": TEMPLATE,
    "thinking": TEMPLATE,
    "reasoning_effort": TEMPLATE,
    "template_kwargs": TEMPLATE,
    "tool_choice": "tools= of Engine.chat alone, because a template gets all of them",
    "functions": "tools= of Engine.chat",
    # new weights, and sleep
    "clear_cache": 'requests=, "keep" for requests that keep their cache, else "retract"',
    "flush_cache": "requests=, because the prefix cache is always emptied",
    "filter_types": "weights=, arrays by the names of a checkpoint",
    "level": 'weights=, "keep", "host" or "drop"',
    "tags": "no such option, because weights and caches come back together",
    "prompt": PROMPTS,
    "inputs": PROMPTS,
    "input_ids": PROMPTS,
    "prompt_token_ids": PROMPTS,
}


def check_names(
    owner: str, names: Iterable[object], valid: Iterable[str], elsewhere: Mapping[str, Iterable[str]] | None = None
) -> None:
    """Refuse keyword arguments with unknown names.

    Args:
        owner: function or class that got the arguments, for the error.
        names: names of the arguments.
        valid: names that the owner takes.
        elsewhere: names that other functions or classes of jspec take, by function or class.

    Raises:
        TypeError: a name is unknown. The message says which name to use instead.
    """
    known = list(valid)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{owner}: expected names of type str, got {short(name)}; write the names in quotes")
        if name not in known:
            raise TypeError(f"{owner}: expected {_expected(name, known, elsewhere or {})}, got {name:.50}=")


def _expected(name: str, known: list[str], elsewhere: Mapping[str, Iterable[str]]) -> str:
    owner = next((other for other, names in elsewhere.items() if name in names), None)
    if owner is not None:
        return f"this argument in {owner}, not here"
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return " or ".join(f"{match}=" for match in near) if near else f"one of {', '.join(known)}"


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def keywords_checked(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a method that refuses unknown keyword arguments with the error of `check_names`."""
    names = [name for name in signature(method).parameters if name not in ("self", "cls")]

    @wraps(method)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        call = owner.__name__ if method.__name__ == "__init__" else f"{owner.__name__}.{method.__name__}"
        check_names(call, options, names)
        return method(*args, **options)

    return checked


Record = TypeVar("Record", bound=type[Any])


def names_checked(elsewhere: Mapping[str, Iterable[str]] | None = None) -> Callable[[Record], Record]:
    """Return a decorator of a dataclass whose constructor then refuses unknown names with the error of `check_names`.

    Args:
        elsewhere: as for `check_names`.
    """

    def decorate(cls: Record) -> Record:
        original = cls.__init__
        names = [field.name for field in fields(cls) if field.init]

        @wraps(original)
        def constructor(self: Any, *args: Any, **arguments: Any) -> None:
            check_names(cls.__name__, arguments, names, elsewhere)
            original(self, *args, **arguments)

        replaced: Callable[..., None] = constructor
        cls.__init__ = replaced
        return cls

    return decorate
