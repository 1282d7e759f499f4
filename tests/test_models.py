"""The decoder against transformers, and the real small models against their recorded greedy texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jspec import Engine, Model, SamplingParams
from jspec.testing import last_logits
from jspec.tokenizer import load_tokenizer
from tests import tiny

TOLERANCE = 1e-4  # float32 on both sides, in another order of summation
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama 2": dict(num_attention_heads=4, num_key_value_heads=4),
    "grouped": dict(num_attention_heads=8, num_key_value_heads=2),
    "tied": dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "explicit head_dim": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "llama3 rope": dict(num_attention_heads=4, num_key_value_heads=2, rope_parameters=LLAMA3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=3)
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **CONFIGS[name])).eval()
    theirs.save_pretrained(tmp_path)
    ours = Model.from_pretrained(tmp_path, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 97, 80).tolist()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(last_logits(ours, ids), wanted, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["stories260k", "tinystories656k"])
def test_the_real_models_say_what_was_recorded(name: str, data: Path) -> None:
    target, cases = tiny.load_target(data / name), tiny.greedy_cases(data / name)
    engine = Engine(target, slots=4, max_len=256, buckets=(4,), prefill_buckets=(64,))
    params = [SamplingParams(max_tokens=len(case["greedy_ids"]), temperature=0) for case in cases]
    done = engine.generate([case["prompt_ids"] for case in cases], params)
    for completion, case in zip(done, cases, strict=True):
        assert completion.token_ids == case["greedy_ids"]


@pytest.mark.parametrize("name", ["stories260k", "tinystories656k"])
def test_the_real_models_logits_equal_transformers(name: str, data: Path) -> None:
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(data / name)
    assert tokenizer is not None
    ids = tokenizer.encode("Once upon a time, there was a little girl ")
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(data / name)(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(last_logits(tiny.load_target(data / name), ids), wanted, atol=TOLERANCE)


def test_a_wrong_rope_base_is_caught(data: Path) -> None:
    """The negative control."""
    target = tiny.load_target(data / "stories260k")
    case = tiny.greedy_cases(data / "stories260k")[0]
    other = Model.from_weights(
        tiny.replace(target.config, rope=tiny.replace(target.config.rope, theta=500000.0)),
        dict(embed=target.embed, layers=[vars(layer) for layer in target.layers], norm=target.norm),
    )
    difference = last_logits(other, case["prompt_ids"]) - last_logits(target, case["prompt_ids"])
    assert np.abs(difference).max() > 100 * TOLERANCE
