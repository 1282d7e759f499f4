"""Test the files of DSpark heads and what their drafters refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import DFlash, DSpark, Tree
from jspec.draft import auto
from jspec.draft.dspark_head import DSparkHead
from jspec.draft.formats.dflash_format import read_dflash
from jspec.draft.head_config import DSparkConfig
from jspec.models.weights.quantize import quantize_weights
from jspec.tools import info
from jspec.tools.convert import main
from tests.draft.test_dflash import CONFIG as DFLASH
from tests.draft.test_dflash import ROOT, computed, states, target
from tests.draft.test_dspark import (
    CONFIG,
    DEPTH,
    RANK,
    after,
    base,
    drafted,
    drafter_of,
    log_softmax,
    node_paths,
    tensors,
)
from tests.reference import dflash as block_reference
from tests.reference.head import norm
from tests.support import byte_pair, folders, tiny
from tests.support.folders import without
from tests.support.recordings import TOLERANCE

pytestmark = pytest.mark.once


def test_dspark_config_of_the_authors_drafts_from_the_anchor() -> None:
    config = read_dflash(CONFIG, kind="dspark")
    assert isinstance(config, DSparkConfig)
    assert (config.block_size, config.max_depth, config.feature_layers) == (DEPTH, DEPTH, (1, 2))
    assert (config.markov_rank, config.markov_head_type) == (RANK, "vanilla")
    assert config.confidence_head and config.confidence_head_with_markov and config.sample_from_anchor
    assert DSparkConfig.from_json(config.to_json()) == config


SPECFORGE: dict[str, Any] = {
    **DFLASH,
    "architectures": ["DSparkDraftModel"],
    "block_size": DEPTH,
    "dflash_config": {
        **DFLASH["dflash_config"],
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
    },
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "transformer_layer_config": {
        **without(DFLASH, "block_size", "dflash_config", "num_target_layers", "architectures"),
        "model_type": "llama",
    },
    "aux_hidden_state_layer_ids": [0, 1],
    "block_size": DEPTH,
    "mask_token_id": 39,
    "draft_vocab_size": 10,
    "sample_from_anchor": True,
    **{name: CONFIG[name] for name in ("markov_rank", "markov_head_type", "enable_confidence_head")},
    "confidence_head_with_markov": True,
}


def test_dspark_head_of_specforge_is_that_of_the_authors_with_the_targets_embedding(tmp_path: Path) -> None:
    own = {name: t for name, t in tensors().items() if name not in ("embed_tokens.weight", "lm_head.weight")}
    drafter = DSpark.from_pretrained(folders.write(tmp_path, SPECFORGE, own), tree=Tree.chain(DEPTH))
    assert drafter.head.config == read_dflash(CONFIG, kind="dspark")
    model = target()
    right = block_reference.block_states(SPECFORGE, own, np.asarray(model.embed), states(), ROOT, DEPTH)
    right = norm(right, own["norm.weight"].astype(np.float64), 1e-5) @ np.asarray(model.output_head, np.float64).T
    np.testing.assert_allclose(computed(drafter, model, states()), right, atol=TOLERANCE * np.abs(right).max())


def test_dspark_head_of_speculators_corrects_the_logits_of_its_vocabulary(tmp_path: Path) -> None:
    """The token before is a target id, the correction is of draft ids; the converted folder drafts the same."""
    ids = folders.DRAFT_IDS
    own = {**tensors(), "lm_head.weight": tensors()["lm_head.weight"][ids]} | folders.vocabulary(ids)
    own["markov_head.markov_w2.weight"] = own["markov_head.markov_w2.weight"][ids]
    source = folders.write(tmp_path / "source", SPECULATORS, own)
    assert main([str(source), str(tmp_path / "converted")]) == 0
    drafts = []
    for folder in (source, tmp_path / "converted"):
        drafter = DSpark.from_pretrained(folder, tree=Tree.chain(DEPTH))
        assert drafter.head.config.feature_layers == (0, 1), "the ids of speculators are those of states"
        drafts.append(drafted(drafter))
        assert drafts[-1].probs is not None
        for node, path in enumerate(node_paths(drafts[-1])[:-1]):
            right = np.exp(log_softmax(after(path, "vanilla")[ids]))
            np.testing.assert_allclose(drafts[-1].probs[0, node], right, atol=1e-5)
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)


def test_dspark_head_whose_root_drafts_nothing_takes_the_states_of_the_mask_tokens(tmp_path: Path) -> None:
    """Older heads of speculators; the control drafts from the anchor."""
    config = {**without(SPECULATORS, "draft_vocab_size"), "sample_from_anchor": False}
    drafter = DSpark.from_pretrained(folders.write(tmp_path, config, tensors()), tree=Tree.chain(DEPTH - 1))
    own = tensors()
    found = computed(drafter, target(), states())
    right = block_reference.block_logits(
        DFLASH, own, own["embed_tokens.weight"], states(), ROOT, DEPTH - 1, output=own["lm_head.weight"].astype(float)
    )
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    assert np.abs(found - base()[:-1]).max() > 100 * TOLERANCE


def test_dflash_head_of_the_dspark_authors_drafts_from_the_anchor(tmp_path: Path) -> None:
    """It has the DSpark architecture without its heads."""
    config = {**without(CONFIG, "markov_head_type", "confidence_head_with_markov"), "markov_rank": 0}
    config["enable_confidence_head"] = False
    own = {name: t for name, t in tensors().items() if not name.startswith(("markov", "confidence"))}
    folder = folders.write(tmp_path, config, own)
    drafter = DFlash.from_pretrained(folder, tree=Tree.chain(DEPTH))
    np.testing.assert_allclose(computed(drafter, target(), states()), base(), atol=TOLERANCE * np.abs(base()).max())
    assert isinstance(auto.load_drafter(folder), DFlash)
    with pytest.raises(ValueError, match="expected a checkpoint of kind 'dspark', got 'dflash'"):
        DSpark.from_pretrained(folder)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"markov_head_type": "lstm"}, NotImplementedError, "markov_head_type.*lstm"),
    "rank": ({"markov_rank": -1}, ValueError, "markov_rank: expected an integer from 0"),
    "rank 0": ({"markov_rank": 0}, ValueError, r"confidence_head_with_markov: expected false .* got true"),
    "text": ({"enable_confidence_head": "yes"}, ValueError, "enable_confidence_head: expected true or false"),
    "two": ({"dflash_config": {"markov_rank": 8}}, ValueError, "markov_rank: expected one value"),
    "layers": ({"model_type": "gemma4_text"}, NotImplementedError, "model_type.*gemma4_text"),
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, NotImplementedError, "projector_type.*domino"),
    "unknown": ({"dflash_config": {"markov_order": 2}}, NotImplementedError, "dflash_config: markov_order"),
    "anchor": (
        {"speculators_model_type": "dspark", "transformer_layer_config": CONFIG},
        ValueError,
        "sample_from_anchor: expected true or false in a speculators config.json",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dspark_config_with_an_unsupported_or_wrong_value_raises_naming_it(name: str) -> None:
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        read_dflash({**CONFIG, **changes}, kind="dspark")


DAMAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no Markov head": ("markov_head", {}, "missing: markov_head.markov_w1.weight, markov_head.markov_w2.weight"),
    "no confidence head": ("confidence_head", {}, "missing: confidence_head.proj.bias"),
    "neither": ("markov_head confidence_head", {}, r"markov_rank: expected the tensors markov_head\.\*.*got none"),
    "gate": ("", {"markov_head_type": "gated"}, "missing: markov_head.gate_proj.bias"),
    "another rank": ("", {"markov_rank": 8}, r"wrong shape: .*markov_w1.weight \(expected \(40, 8\), got \(40, 4\)\)"),
    "unread": ("", {"enable_confidence_head": False}, "unknown: confidence_head.proj.bias"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_dspark_file_that_contradicts_its_config_raises_naming_the_tensors(tmp_path: Path, name: str) -> None:
    left_out, changes, message = DAMAGED[name]
    prefixes = tuple(left_out.split()) or ("none",)
    own = {key: tensor for key, tensor in tensors().items() if not key.startswith(prefixes)}
    with pytest.raises(ValueError, match=message):
        auto.load_drafter(folders.write(tmp_path, {**CONFIG, **changes}, own))


# ---- drafters


def test_dspark_drafter_refuses_heads_trees_temperatures_and_targets_that_do_not_fit() -> None:
    model = target()
    head = tiny.dspark_head(model, block_size=4, feature_layers=(1, 2))
    assert DSpark(head).tree == Tree.chain(4) and DSpark(head).with_window(6).draft_window == 6
    with pytest.raises(ValueError, match=r"DSpark: expected a tree at most 4 deep, .* got chain:5"):
        DSpark(head, "chain:5")
    with pytest.raises(TypeError, match="DFlash: head: expected a head of method 'dflash', got one of 'dspark'"):
        DFlash(head)
    with pytest.raises(TypeError, match="DSpark: head: expected DSparkHead, got"):
        DSpark(tiny.dflash_head(model, block_size=4, feature_layers=(1, 2)))
    for wrong in ([1.0] * 3, [1.0, 1.0, 0.0, 1.0], [1.0, 1.0, float("nan"), 1.0]):
        with pytest.raises(ValueError, match="temperatures: expected 4 numbers above 0, one for each depth"):
            DSpark(head).calibrated(wrong)
    with pytest.raises(ValueError, match="DSpark: vocabulary: the target needs 41, the head has 40"):
        DSpark(head).bind(tiny.model(41, layers=3))


def test_copies_of_a_dspark_drafter_keep_its_calibration() -> None:
    drafter = DSpark(tiny.dspark_head(target(), block_size=4, feature_layers=(1, 2))).calibrated([2.0] * 4)
    assert drafter.with_window(8).temperatures == drafter.cut(2).temperatures == (2.0,) * 4


@pytest.mark.long
def test_quantised_dspark_head_keeps_its_markov_head_unquantised(tmp_path: Path) -> None:
    drafter = drafter_of(tmp_path)
    quantised = DSpark(quantize_weights(drafter.head, "int8"), Tree.chain(DEPTH))
    assert quantised.head.markov == drafter.head.markov
    one, other = (np.asarray(drafted(d).probs[0, 0]) for d in (drafter, quantised))  # type: ignore[index]
    assert 1e-5 < np.abs(one - other).max() < 0.1


def test_info_of_a_dspark_head_names_its_heads(golden: Path) -> None:
    text, fits = info.inspect_pair([golden / "dspark/draft"], byte_pair.TARGET)
    assert fits
    for part in (
        "DSpark head (official format)",
        "block: 7 tokens with the root, of which 7 draft, mask token 255",
        "Markov head: vanilla, rank 16",
        "confidence head: reads state and Markov embedding",
        "flags beside plain DSpark: none",
        "states 2, 4, 6",
    ):
        assert part in text


def test_folder_of_a_dspark_head_is_recognised_as_a_drafter(golden: Path) -> None:
    drafter = auto.load_drafter(golden / "dspark/draft", dtype="float32", length=9)
    assert isinstance(drafter, DSpark) and drafter.tree == Tree.chain(7)
    assert isinstance(drafter.head, DSparkHead)
