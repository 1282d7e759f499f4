"""The tokens that an engine must emit under masks with any drafter, decoded token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jspec import SamplingParams
from jspec.sampling import sampler
from tests.reference import decoder, descent, processors, regular
from tests.support import engines, lettered
from tests.support.arrays import on_device


def decoded(
    prompt: list[int],
    params: SamplingParams,
    seed: int | None = None,
    *,
    texts: Sequence[bytes | None] = lettered.TEXTS,
    readers: Mapping[str, Callable[..., bool]] | None = None,
    edit: Callable[[np.ndarray, list[int], list[int]], np.ndarray] = lambda logits, *_: logits,
    answer: Callable[[list[int], list[int]], tuple[list[int] | None, set[int]]] = lambda _, output: (output, set()),
) -> list[int]:
    """Decode a request: for every token compute a pass over the whole text and sample with the project's noise.

    Penalties come from transformers' processors, allowed tokens from the library regex or from recursive descent.

    Args:
        seed: replaces the request's seed.
        texts: text of every token.
        readers: a recursive-descent reader for each grammar.
        edit: function of the masked logits, the prompt and the output that returns the logits to sample from.
        answer: function of the prompt and the output that returns the tokens that the grammar reads (None: it allows
            any token but stop ids) and tokens that are allowed besides.
    """
    output: list[int] = []
    seed = params.seed if seed is None else seed
    stops = {*params.stop_token_ids, *([] if params.ignore_eos else [lettered.END])}
    while len(output) < params.max_tokens and not set(output[-1:]) & stops:
        logits = decoder.logits(engines.target(), np.array([[*prompt, *output]]))[0, -1].astype(np.float32)
        logits = processors.edited(logits, prompt, output, params, sorted(stops))
        (read, more), allowed = answer(prompt, output), set(range(engines.VOCAB))
        text = b"".join(texts[token] or b"" for token in read or ())
        if read is None:  # before the answer
            allowed -= stops if params.grammar_field is not None else set()
        elif params.regex is not None:
            allowed = regular.allowed(params.regex, texts, text, stops)
        elif params.grammar_field is not None:
            assert readers is not None
            allowed = descent.allowed(readers[getattr(params, params.grammar_field)], texts, text, stops)
        logits[sorted(set(range(engines.VOCAB)) - allowed - more)] = -np.inf
        logits = edit(logits, prompt, output)
        if params.temperature:
            assert seed is not None
            words = on_device([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32)
            key = sampler.keys(words, 0, on_device([len(prompt) + len(output)]))
            logits = processors.processed(logits, params) + np.asarray(sampler.gumbel(key, engines.VOCAB))[0]
        output.append(int(logits.argmax()))
    return output
