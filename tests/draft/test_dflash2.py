"""Compare DFlash2 heads with the formulas, and test their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import DFlash, DFlash2, Tree
from jspec.core.records import Draft
from jspec.draft.formats.dflash_format import read_dflash
from jspec.draft.head_config import DFlash2Config
from jspec.models.weights.quantize import quantize_weights
from jspec.tools import info
from jspec.tools.convert import main
from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.weights import Quantized
from tests.draft.test_dflash import CONFIG as DFLASH
from tests.draft.test_dflash import ROOT, TOKENS, computed, states, target, tensors_of
from tests.draft.test_dspark import DEPTH, HIDDEN, MIXED, VOCAB, before, best_paths, log_softmax, node_paths
from tests.reference import dflash as reference
from tests.reference.head import norm
from tests.support import folders
from tests.support.recordings import TOLERANCE
from tests.support.views import prefilled, view_of_rows

pytestmark = pytest.mark.once

TAPS, GROUP, RANK, CANDIDATES = 2, 4, 6, 7
MULTIPLIER, SOFTCAP, SCALE = 0.5, 3.0, 1.5
OWN = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": CANDIDATES,
    "input_embedding_scale": SCALE,
    "output_multiplier": MULTIPLIER,
    "final_logit_softcapping": SOFTCAP,
}
CONFIG: dict[str, Any] = {
    **DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {**DFLASH["dflash_config"], **OWN},
}
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")


@cache
def tensors() -> dict[str, np.ndarray]:
    """Return random tensors; convolutions and selector change states and logits about as much as the rest."""
    convolutions: dict[str, tuple[int, ...]] = {}
    for layer in range(DFLASH["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            convolutions[f"layers.{layer}.{part}.base_kernel"] = (2, TAPS, HIDDEN)
            convolutions[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * TAPS * HIDDEN // GROUP, HIDDEN)
    codes = dict(zip(SELECTOR, ((VOCAB, RANK), (VOCAB, RANK), (RANK, HIDDEN)), strict=True))
    drawn = folders.random_tensors({f"candidate_selector.{name}": shape for name, shape in codes.items()})
    drawn |= {name: 0.3 * values for name, values in folders.random_tensors(convolutions).items()}
    for name in convolutions:
        if name.endswith("base_kernel"):
            drawn[name][:, 0] += 1
    return tensors_of() | {name: values.astype(np.float32) for name, values in drawn.items()}


def drafter_of(folder: Path, tree: Tree, config: dict[str, Any] = CONFIG) -> DFlash2:
    return DFlash2.from_pretrained(folders.write(folder, config, tensors()), tree=tree)


def drafted(drafter: DFlash, accept: str = "rejection", temperature: float = 1.0) -> Draft:
    params, cache, _ = prefilled(drafter, target(), states())
    view = view_of_rows([ROOT], temperature=temperature, accept=accept, length=TOKENS)
    return jax.jit(drafter.draft)(params, cache, view)[0]


@cache
def block(**changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the normed states of a block at depths from 1 on [depth, hidden], and the logits there [depth, vocab]."""
    model, own = target(), {**tensors(), **{name: dict(tensors())[name] * 0 for name in changes.pop("zero", ())}}
    embed, output = SCALE * np.asarray(model.embed), np.asarray(model.output_head, np.float64)
    found = reference.block_states(CONFIG, own, embed, states(), ROOT, DEPTH + 1, **changes)
    hidden = norm(found, own["norm.weight"].astype(np.float64), CONFIG["rms_norm_eps"])[1:]
    return hidden, np.tanh(hidden @ output.T * MULTIPLIER / SOFTCAP) * SOFTCAP


def after(path: tuple[int, ...], *, token: int | None = None, candidates: int = CANDIDATES) -> np.ndarray:
    """Return the log-probabilities of the token after a path [vocab]; -inf for tokens that are no candidates."""
    hidden, logits = (part[len(path)] for part in block())
    predecessor, successor, project = (tensors()[f"candidate_selector.{name}"].astype(float) for name in SELECTOR)
    last = before(path)[-1] if token is None else token
    ids = np.argsort(-logits)[:candidates]
    scores = np.full(VOCAB, -np.inf)
    scores[ids] = logits[ids] + successor[ids] @ (predecessor[last] * (project @ hidden))
    return log_softmax(scores)


def test_block_of_a_dflash2_head_has_the_logits_of_the_formulas(tmp_path: Path) -> None:
    """Controls: a block without convolutions; one that sees only earlier tokens."""
    found, right = computed(drafter_of(tmp_path, Tree.chain(DEPTH)), target(), states()), block()[1]
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    names = tuple(name for name in tensors() if name.endswith("kernel_projection.weight"))
    for control in (block(zero=names)[1], block(causal=True)[1]):
        assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


@pytest.mark.parametrize(("kind", "limit"), [("int8", 1e-4), ("fp8_dynamic", 0.3)])
def test_block_of_a_quantised_head_has_the_logits_of_its_widened_weights(
    tmp_path: Path, kind: str, limit: float
) -> None:
    """Products of "fp8_dynamic" quantise their inputs, but convolutions do not; the control is not quantised."""
    chain = Tree.chain(DEPTH)
    drafter = drafter_of(tmp_path, chain)
    stored = quantize_weights(drafter.head, kind)
    wide = jax.tree.map(
        lambda leaf: widened(leaf).astype(np.float32) if isinstance(leaf, Quantized) else leaf,
        stored,
        is_leaf=lambda leaf: isinstance(leaf, Quantized),
    )
    found, right, control = (
        computed(DFlash2(head, chain), target(), states()) for head in (stored, wide, drafter.head)
    )
    assert np.abs(found - right).max() < limit * np.abs(right).max()
    assert np.abs(found - control).max() > 0.05 * np.abs(right).max()


@pytest.mark.parametrize("tree", [MIXED, pytest.param(Tree.chain(DEPTH), marks=pytest.mark.long)], ids=str)
def test_children_are_drawn_among_the_candidates_by_the_token_before(tmp_path: Path, tree: Tree) -> None:
    """Controls: no selector, another token before, a candidate more."""
    draft = drafted(drafter_of(tmp_path, tree))
    assert draft.probs is not None
    paths, probs, errors = node_paths(draft), np.asarray(draft.probs[0]), np.zeros(3)
    for node in tree.fed:
        path = paths[node]
        np.testing.assert_allclose(probs[node], np.exp(after(path)), atol=5e-5)
        assert (probs[node] > 0).sum() == CANDIDATES
        for child in np.flatnonzero(np.asarray(draft.parents[0]) == node):
            score = float(draft.scores[0, child] - draft.scores[0, node])
            assert score == pytest.approx(after(path)[paths[child][-1]], abs=1e-4)
        others = (
            log_softmax(block()[1][len(path)]),
            after(path, token=(before(path)[-1] + 1) % VOCAB),
            after(path, candidates=CANDIDATES + 1),
        )
        errors = np.maximum(errors, [np.abs(np.exp(other) - probs[node]).max() for other in others])
    assert errors.min() > 0.01, errors


def test_dynamic_tree_has_the_best_paths_of_the_lattice(tmp_path: Path) -> None:
    """The control leaves the selector out."""
    nodes, k = 14, 3
    draft = drafted(drafter_of(tmp_path, Tree.topk(nodes, DEPTH, k)), "coupled")
    found = dict(zip(node_paths(draft)[1:], np.asarray(draft.scores[0, 1:]).tolist(), strict=True))
    right = best_paths(after, nodes, k)
    assert set(found) == set(right) and len(found) == nodes - 1
    np.testing.assert_allclose([found[path] for path in right], list(right.values()), atol=1e-4)
    assert set(best_paths(lambda path: log_softmax(block()[1][len(path)]), nodes, k)) != set(right)


def test_identity_convolutions_and_a_selector_of_zeros_draft_as_dflash(tmp_path: Path) -> None:
    """The control has the convolutions and the selector as drawn."""
    own = dict(tensors())
    for name, values in own.items():
        if name not in tensors_of():
            own[name] = np.zeros_like(values)
            if name.endswith("base_kernel"):
                own[name][:, 0] = 1
    config = {**CONFIG, "dflash_config": {**DFLASH["dflash_config"], "selector_rank": RANK, "conv_group_size": GROUP}}
    chain = Tree.chain(DEPTH)
    plain = DFlash.from_pretrained(folders.write(tmp_path / "dflash", DFLASH, tensors_of()), tree=chain)
    converted = DFlash2.from_pretrained(folders.write(tmp_path / "dflash2", config, own), tree=chain)
    wanted, found, control = (
        np.asarray(drafted(drafter, "coupled", temperature=0.0).tokens[0])
        for drafter in (plain, converted, drafter_of(tmp_path / "drawn", chain))
    )
    np.testing.assert_array_equal(found, wanted)
    assert (control != wanted).any()


def test_file_with_the_keys_beside_dflash_config_and_a_converted_folder_are_equal(tmp_path: Path) -> None:
    nested = folders.write(tmp_path / "nested", CONFIG, tensors())
    beside = folders.write(tmp_path / "beside", {**DFLASH, **OWN, "architectures": ["DFlash2DraftModel"]}, tensors())
    assert main([str(nested), str(tmp_path / "orbax")]) == 0
    first, *others = (DFlash2.from_pretrained(path) for path in (nested, beside, tmp_path / "orbax"))
    for other in others:
        assert other.head.config == first.head.config
        jax.tree.map(np.testing.assert_array_equal, other.head, first.head)
    assert "selector: rank 6, 7 candidates" in info.describe(nested)


def test_layers_with_a_window_see_their_whole_block_unless_the_file_says_otherwise() -> None:
    windows = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}
    for changes, is_causal in (({}, False), ({"sliding_window_non_causal": False}, True)):
        config = read_dflash({**CONFIG, **windows, **changes}, kind="dflash2")
        assert isinstance(config, DFlash2Config)
        assert [layer.gqa.causal for layer in config.layers] == [is_causal] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 5}, r"conv_group_size: expected a divisor of hidden_size \(16\), got 5"),
        ({"selector_top_k": 0}, "selector_top_k: expected"),
        ({"output_multiplier": 0.0}, "output_multiplier: expected a finite number above 0, got 0.0"),
    ],
    ids=str,
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_dflash({**CONFIG, "dflash_config": {**CONFIG["dflash_config"], **changes}}, kind="dflash2")


def test_options_of_other_heads_are_refused() -> None:
    for kind, name in (("dflash", "output_multiplier"), ("dspark", "selector_rank")):
        config = {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], name: 2}}
        with pytest.raises(NotImplementedError, match=f"dflash_config: {name}: expected none, got 2"):
            read_dflash(config, kind=kind)
    with pytest.raises(CheckpointError, match=r"markov_rank: expected the tensors markov_head\.\*"):
        read_dflash({**CONFIG, "markov_rank": 4}, kind="dflash2")


def test_node_with_more_children_than_candidates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at most 7 children of a node, the selector_top_k of the head, got"):
        drafter_of(tmp_path, Tree.topk(30, 3, 8))
