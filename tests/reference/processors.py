"""Penalties and filters of one row of logits: transformers' processors, and presence and frequency penalty in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jspec import SamplingParams


def edited(
    logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, stops: Sequence[int]
) -> np.ndarray:
    """Return the logits [vocab] after a text with all penalties and bans, before temperature, in float32."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    ids, scores = torch.tensor([[*prompt, *output]]), torch.tensor(logits, dtype=torch.float32)[None]
    if params.logit_bias:
        bias = {(int(token),): float(value) for token, value in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    scores = torch.tensor(scores.numpy()[0] - penalty(output, params, len(logits)))[None]
    if params.bad_words:
        scores = hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, scores)
    if params.min_tokens:
        ends = torch.tensor(list(stops))
        scores = hf.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)(ids, scores)
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        scores = hf.PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1)(ids, scores)
    return scores.numpy()[0]


def penalty(output: Sequence[int], params: SamplingParams, vocab: int) -> np.ndarray:
    """Return the presence and frequency penalty [vocab] to be subtracted from each token's logit."""
    counts = np.bincount(output, minlength=vocab).astype(np.float32)
    return np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty) * (counts > 0)


def processed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return edited logits [vocab] after temperature, top-k, top-p and min-p."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    scores = torch.tensor(logits, dtype=torch.float32)[None]
    warpers = [hf.TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k > 0:
        warpers.append(hf.TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(float(params.top_p)))
    if params.min_p > 0:
        warpers.append(hf.MinPLogitsWarper(float(params.min_p)))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.numpy()[0]
