"""Compare the decoder with transformers, and small real models with their recorded greedy texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Engine, Model, SamplingParams
from jspec.core.numerics import AUTO
from jspec.core.records import TokenBatch
from jspec.models import decoder
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.tools.testing import last_logits
from pallas_kernels import ancestor_bits
from tests.support import byte_pair, recordings, tiny
from tests.support.arrays import on_device

TOLERANCE = 1e-4  # both sides use float32 but add up in different orders
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
def test_decoder_logits_of_random_llamas_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
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


@pytest.mark.once
def test_forward_logits_of_the_demo_target_equal_transformers() -> None:
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    from transformers import AutoModelForCausalLM

    ids = list(b"def __init__(self, name):\n        self.")
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(byte_pair.TARGET)(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(last_logits(tiny.load_target(byte_pair.TARGET), ids), wanted, atol=TOLERANCE)


@pytest.fixture
def recorded(golden: Path) -> dict[str, np.ndarray]:
    """Prompts, greedy tokens and logits that transformers computes for a Llama with llama3 RoPE scaling."""
    return recordings.recording(golden / "families" / "llama" / "expect.npz")


@pytest.mark.long
def test_engine_with_llama3_rope_emits_the_greedy_tokens_of_transformers(
    golden: Path, recorded: dict[str, np.ndarray]
) -> None:
    target = tiny.load_target(golden / "families" / "llama")
    engine = Engine(target, slots=3, max_len=160, buckets=(3,), prefill_buckets=(80,))
    prompts = [recorded[f"prompt{i}"].tolist() for i in range(3)]
    done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    for i, completion in enumerate(done):
        assert completion.token_ids == recorded[f"greedy{i}"].tolist()


def test_forward_logits_with_llama3_rope_equal_the_recorded_ones_and_differ_without_it(
    golden: Path, recorded: dict[str, np.ndarray]
) -> None:
    """A plain RoPE is the negative control of the comparisons with transformers."""
    target, ids = tiny.load_target(golden / "families" / "llama"), recorded["prompt2"].tolist()
    plain = target.replace(config=target.config.resized(rope=replace(target.config.rope, kind="default")))
    np.testing.assert_allclose(last_logits(target, ids), recorded["logits2"][-1], atol=TOLERANCE)
    tokens = [recorded["greedy2"].tolist()]
    assert recordings.most_likely(target, [ids], tokens) == tokens
    assert np.abs(last_logits(plain, ids) - recorded["logits2"][-1]).max() > 100 * TOLERANCE


@pytest.mark.once
@pytest.mark.parametrize("name", ["stories260k", pytest.param("tinystories656k", marks=pytest.mark.long)])
def test_engine_with_published_models_emits_the_greedy_tokens_of_transformers(name: str, data: Path) -> None:
    target, cases = tiny.load_target(data / name), tiny.greedy_cases(data / name)
    engine = Engine(target, slots=4, max_len=256, buckets=(4,), prefill_buckets=(64,))
    params = [SamplingParams(max_tokens=len(case["greedy_ids"]), temperature=0) for case in cases]
    done = engine.generate([case["prompt_ids"] for case in cases], params)
    for completion, case in zip(done, cases, strict=True):
        assert completion.token_ids == case["greedy_ids"]


@pytest.mark.once
def test_forward_of_a_published_model_has_the_greedy_tokens_of_transformers(data: Path) -> None:
    target, cases = tiny.load_target(data / "tinystories656k"), tiny.greedy_cases(data / "tinystories656k")
    prompts, tokens = ([case[name] for case in cases] for name in ("prompt_ids", "greedy_ids"))
    assert recordings.most_likely(target, prompts, tokens) == tokens


@pytest.mark.parametrize("is_tree", [False, True])
def test_decoder_with_padding_rows_returns_unchanged_logits_features_and_caches(
    is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows pad a sequence to a multiple of eight rows, which a kernel needs."""
    model, rng = tiny.model(40), np.random.default_rng(0)
    pool = PoolShape(2, 9, 4, 16, "float32", "float32")
    parents = on_device([[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]], jnp.int32)
    batch = TokenBatch(
        tokens=on_device(rng.integers(0, 40, (2, 5)), jnp.int32),
        positions=on_device([[3, 4, 4, 5, 5], [6, 7, 8, 8, 7]], jnp.int32),
        valid=on_device(np.ones((2, 5), bool)),
        first_row=on_device([3, 6], jnp.int32),
        page_table=on_device(np.arange(1, 9, dtype=jnp.int32)).reshape(2, 4),
        bits=ancestor_bits(parents) if is_tree else None,
        numerics=AUTO,
    )
    cache = jax.tree.map(
        lambda x: on_device(rng.normal(size=x.shape), x.dtype), create(model.config.layers, pool, "float32")
    )

    def run(more: int) -> tuple:
        monkeypatch.setattr(decoder, "kernel_padding", lambda *shapes: more)
        return decoder.forward(model, cache, batch, feature_layers=(0, 1, 3))

    wanted = run(0)
    for more in (1, 3):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(more), wanted)
    written = batch.pad(3)
    monkeypatch.setattr(TokenBatch, "pad", lambda self, more: replace(written, valid=written.valid.at[:].set(True)))
    changed = run(3)[1]
    assert np.abs(changed[0].k - wanted[1][0].k).max() > 0.1, "control: padding rows that are written change the cache"
