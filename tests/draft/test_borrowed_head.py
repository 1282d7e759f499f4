"""Heads that use the embedding and the output head of targets with scaled embeddings and limited logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Eagle, Eagle3, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.models.weights.quantize import quantize_weights
from tests.draft.test_head_options import TOKENS, TOLERANCE, computed
from tests.reference import head as reference
from tests.support import tiny

pytestmark = pytest.mark.once

LAYER = {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}


def target_of(golden: Path, family: str) -> Model:
    target = tiny.load_target(golden / "families" / family)
    assert target.config.embed_scale != 1 and (target.config.logit_divisor, target.config.logit_softcap) != (1, None)
    return target


def head_of(target: Model, method: str) -> Eagle | Eagle3:
    """Return a drafter whose head has neither an embedding nor an output head."""
    if method == "eagle":
        return Eagle(tiny.eagle1_head(target), Tree.chain(2))
    vocab = target.config.vocab_size
    head = tiny.eagle_head(target, draft_vocab=vocab, feature_layers=(1, 2, 4))
    return Eagle3(head.replace(head=None), Tree.chain(2))


def formula(head: EagleHead, target: Model, tokens: np.ndarray, features: np.ndarray, **wrong: Any) -> np.ndarray:
    """Compute the logits [tokens, vocab]; ``wrong``: other values of the target's config."""
    c, own = head.config, {**vars(target.config), **wrong}
    config = {
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
    }  # fmt: skip
    layer = head.layers[0]
    tensors = {f"layers.0.{name}.weight": np.asarray(getattr(layer, field)) for field, name in LAYER.items()}
    tensors |= {
        "layers.0.post_attention_layernorm.weight": np.asarray(layer.mlp_norm),
        "fc.weight": np.asarray(head.fc),
    }
    embed = np.asarray(target.embed, np.float64)
    output = np.asarray(target.output_head, np.float64).T
    embedded = embed[tokens] * wrong.get("embed_factor", 1.0)
    if c.method == "eagle":
        tensors["fc.bias"] = np.asarray(head.fc_bias)
        logits = reference.eagle1(config, tensors, embedded, features) @ output
    else:
        tensors |= {f"layers.0.{n}.weight": np.ones(c.hidden_size) for n in ("input_layernorm", "hidden_norm")}
        tensors |= {"norm.weight": np.asarray(head.norm), "lm_head.weight": output.T}
        logits = reference.eagle3(config, tensors, embedded, features)
    logits = logits / own["logit_divisor"]
    return logits if own["logit_softcap"] is None else own["logit_softcap"] * np.tanh(logits / own["logit_softcap"])


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("family", "wrong"), [("gemma2", {"logit_softcap": None}), ("granite", {"logit_divisor": 1.0})], ids=str
)
def test_head_with_the_target_output_head_has_its_divisor_and_limit_and_reads_the_unscaled_embedding(
    golden: Path, family: str, wrong: dict[str, Any], method: str
) -> None:
    """Negative controls: logits without the divisor or limit; for EAGLE-1, the scaled embedding."""
    target = target_of(golden, family)
    drafter, rng = head_of(target, method), np.random.default_rng(3)
    width = target.config.hidden_size * (1 if method == "eagle" else 3)
    tokens, features = rng.integers(0, 128, TOKENS), 2 * rng.normal(size=(TOKENS, width)).astype(np.float32)
    bound = drafter.bind(target)
    assert bound.embed is target.embed and bound.head is target.output_head
    found = computed(bound, np.asarray(target.embed), tokens, features)
    right = formula(drafter.head, target, tokens, features)
    size = np.abs(right).max()
    np.testing.assert_allclose(found, right, atol=TOLERANCE * size)
    assert np.abs(found - formula(drafter.head, target, tokens, features, **wrong)).max() > 50 * TOLERANCE * size
    scaled = formula(drafter.head, target, tokens, features, embed_factor=target.config.embed_scale)
    assert (np.abs(found - scaled).max() > 50 * TOLERANCE * size) == (method == "eagle")


def test_head_with_a_quantised_target_output_head_has_limited_logits(golden: Path) -> None:
    """The scales of a quantised output head are applied before the limit."""
    target = target_of(golden, "gemma2")
    drafter, rng = head_of(target, "eagle"), np.random.default_rng(3)
    tokens, features = rng.integers(0, 128, TOKENS), 2 * rng.normal(size=(TOKENS, 32)).astype(np.float32)
    small = quantize_weights(target, "int8")
    found = computed(drafter.bind(small), np.asarray(target.embed), tokens, features)
    right = formula(drafter.head, target, tokens, features)
    assert np.abs(found - right).max() < 0.02 * np.abs(right).max()


def test_head_with_an_output_head_of_its_own_has_unlimited_logits(golden: Path) -> None:
    target = target_of(golden, "gemma2")
    own = Eagle3(tiny.eagle_head(target, draft_vocab=40, feature_layers=(1, 2, 4)), Tree.chain(2))
    assert own.bind(target).logit_limits == (1.0, None)
    assert head_of(target, "eagle3").bind(target).logit_limits == (1.0, target.config.logit_softcap)
