"""Test DFlash heads of speculators, and heads with an embedding and an output head of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jspec import DFlash, Engine, SamplingParams, Tree
from jspec.tools.convert import main
from tests.draft.test_dflash import CONFIG, ROOT, TOKENS, computed, states, target, tensors_of
from tests.reference import dflash as reference
from tests.support import folders, tiny
from tests.support.folders import without
from tests.support.recordings import TOLERANCE, recording

pytestmark = pytest.mark.once


def test_dflash_head_of_speculators_drafts_from_its_vocabulary(tmp_path: Path) -> None:
    """The file has an embedding. The converted folder has the same config and the same logits."""
    outer = ("block_size", "dflash_config", "num_target_layers", "architectures")
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**without(CONFIG, *outer), "model_type": "llama"},
        "aux_hidden_state_layer_ids": [0, 1],
        "block_size": 6,
        "mask_token_id": 39,
        "draft_vocab_size": 10,
        "projector_type": "dflash",
        "sample_from_anchor": False,
    }
    embed, output = (np.random.default_rng(3).normal(size=(size, 16)).astype(np.float32) for size in (40, 10))
    own = {"embed_tokens.weight": embed, "lm_head.weight": output}
    tensors = tensors_of() | folders.vocabulary(folders.DRAFT_IDS) | own
    source = folders.write(tmp_path / "source", config, tensors)
    assert main([str(source), str(tmp_path / "converted")]) == 0
    right = reference.block_logits(CONFIG, tensors, embed, states(), ROOT, 5, output=output.astype(np.float64))
    drafters = [DFlash.from_pretrained(folder, tree=Tree.chain(5)) for folder in (source, tmp_path / "converted")]
    assert drafters[0].head.config == drafters[1].head.config
    assert drafters[0].head.config.feature_layers == (0, 1), "the ids of speculators are those of states"
    for drafter in drafters:
        np.testing.assert_allclose(computed(drafter, target(), states()), right, atol=TOLERANCE * np.abs(right).max())
    engine = Engine(target(), drafter=drafters[0], slots=1, max_len=48, prefill_buckets=(8,), buckets=(1,))
    (done,) = engine.generate([3, 1, 4], SamplingParams(max_tokens=8, temperature=0), trace=True)
    drafted = {int(token) for one in done.rounds for token in one.tokens[1:]}
    assert drafted <= set(folders.DRAFT_IDS.tolist())


def test_block_of_a_recorded_head_of_speculators_is_that_of_its_code(golden: Path) -> None:
    """Its first layer has a window and is causal within the block; its embedding and output head are its own."""
    recorded = recording(golden / "dflash/speculators/block6.npz")
    drafter = DFlash.from_pretrained(golden / "dflash/speculators/draft", tree="chain:5")
    assert [layer.attention.causal for layer in drafter.head.config.layers] == [True, False]
    assert drafter.head.config.feature_layers == (1, 2) and drafter.head.embed is not None
    found = computed(drafter, target(), recorded["features"], int(recorded["root"]))
    np.testing.assert_allclose(found, recorded["block_logits"], atol=TOLERANCE)
    layers = [replace(one, mixer=replace(one.attention, causal=False)) for one in drafter.head.config.layers]
    other = drafter.head.replace(config=replace(drafter.head.config, layers=tuple(layers)))
    found = computed(DFlash(other, drafter.tree), target(), recorded["features"], int(recorded["root"]))
    assert np.abs(found - recorded["block_logits"]).max() > 50 * TOLERANCE


def test_dflash_head_for_a_wider_target_has_its_own_embedding_and_output_head(tmp_path: Path) -> None:
    model, rng = tiny.model(40, layers=3, hidden=32), np.random.default_rng(5)
    config = {**CONFIG, "target_hidden_size": 32}
    own = {"embed_tokens.weight": (40, 16), "lm_head.weight": (40, 16), "fc.weight": (16, 64)}
    tensors = tensors_of() | {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in own.items()}
    drafter = DFlash.from_pretrained(folders.write(tmp_path / "whole", config, tensors), tree=Tree.chain(5))
    features = rng.normal(size=(TOKENS, 64)).astype(np.float32)
    embed, output = tensors["embed_tokens.weight"], tensors["lm_head.weight"].astype(np.float64)
    right = reference.block_logits(config, tensors, embed, features, ROOT, 5, output=output)
    np.testing.assert_allclose(computed(drafter, model, features), right, atol=TOLERANCE * np.abs(right).max())
    for name, reason in (("embed_tokens", "shares the target's embedding"), ("lm_head", "shares the target's output")):
        part = DFlash.from_pretrained(folders.write(tmp_path / name, config, without(tensors, f"{name}.weight")))
        with pytest.raises(ValueError, match=rf"hidden size \(it {reason}.*\): the target needs 32, the head has 16"):
            part.bind(model)
