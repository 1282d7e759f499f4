"""Compare DSpark heads with the formulas and with recordings of their authors' code."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DSpark, Tree
from jspec.core.numerics import REFERENCE
from jspec.core.records import Draft
from jspec.engine.request.round_record import Round
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.draft.test_dflash import CONFIG as DFLASH
from tests.draft.test_dflash import ROOT, TOKENS, computed, states, target, tensors_of
from tests.draft.test_expand_block import paths_of
from tests.reference import dflash as block_reference
from tests.reference import dspark as reference
from tests.reference.head import norm
from tests.support import byte_pair, folders, recordings, tiny
from tests.support.folders import without
from tests.support.recordings import TOLERANCE, recording
from tests.support.views import prefilled, view_of_rows

pytestmark = pytest.mark.once

RANK, DEPTH, VOCAB, HIDDEN = 4, 5, 40, 16
DETAILED = 12  # recorded prompt whose logits and features are recorded too
KINDS = ("vanilla", "gated", "rnn")
LONG_KINDS = ["vanilla", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])]
CONFIG: dict[str, Any] = {
    **without(DFLASH, "dflash_config"),
    "architectures": ["Qwen3DSparkModel"],
    "block_size": DEPTH,
    "mask_token_id": 39,
    "target_layer_ids": [0, 1],
    "num_anchors": 8,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
WRONG = ("no correction", "correction by another token", "logits of another position")
MIXED = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (0, 1, 1), (0, 1, 0, 0), (0, 1, 0, 0, 0)])


def config_of(kind: str = "vanilla") -> dict[str, Any]:
    return {**CONFIG, "markov_head_type": kind}


@cache
def tensors(kind: str = "vanilla") -> dict[str, np.ndarray]:
    """Return random tensors as the authors save them; the corrections are about as large as the logits."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (VOCAB, HIDDEN) for name in ("embed_tokens", "lm_head")}
    shapes |= {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (VOCAB, RANK)}
    extra: dict[str, dict[str, tuple[int, ...]]] = {
        "vanilla": {},
        "gated": {"gate_proj.weight": (RANK, HIDDEN + RANK), "gate_proj.bias": (RANK,)},
        "rnn": {"joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN), "joint_proj.bias": (3 * RANK,)},
    }
    shapes |= {f"markov_head.{name}": shape for name, shape in extra[kind].items()}
    shapes |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
    drawn = folders.random_tensors(shapes)
    drawn["confidence_head.proj.weight"] *= 0.2
    drawn["lm_head.weight"] *= 0.3
    return tensors_of(DFLASH) | drawn


def drafter_of(folder: Path, kind: str = "vanilla", tree: Tree | None = None) -> DSpark:
    return DSpark.from_pretrained(folders.write(folder, config_of(kind), tensors(kind)), tree=tree or Tree.chain(DEPTH))


def drafted(drafter: DSpark, accept: str = "rejection") -> Draft:
    """Draft after `ROOT` at temperature 1."""
    params, cache, _ = prefilled(drafter, target(), states())
    view = view_of_rows([ROOT], temperature=1.0, accept=accept, length=TOKENS)
    return jax.jit(drafter.draft)(params, cache, view)[0]


@cache
def block(*, normed: bool = True) -> np.ndarray:
    """Return the states of a block by the formulas [depth, hidden]."""
    own = tensors()
    found = block_reference.block_states(CONFIG, own, own["embed_tokens.weight"], states(), ROOT, DEPTH)
    return norm(found, own["norm.weight"].astype(np.float64), CONFIG["rms_norm_eps"]) if normed else found


def base() -> np.ndarray:
    return block() @ tensors()["lm_head.weight"].astype(np.float64).T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def before(path: tuple[int, ...]) -> np.ndarray:
    return np.array([ROOT, *path])


def after(path: tuple[int, ...], kind: str) -> np.ndarray:
    """Return the corrected log-probabilities of the token after a path [vocab]."""
    size = len(path) + 1
    return log_softmax(reference.corrected(tensors(kind), base()[:size], block()[:size], before(path), kind=kind)[-1])


def node_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens on the way to each node, the root's left out."""
    return [(), *paths_of(np.asarray(draft.tokens[0]), np.asarray(draft.parents[0]))]


# ---- formulas


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("rnn", MIXED),  # the others take as long; the tree has a chain
        *(
            pytest.param(kind, tree, marks=pytest.mark.long)
            for kind in ("vanilla", "gated")
            for tree in (Tree.chain(DEPTH), MIXED)
        ),
    ],
    ids=str,
)
def test_children_are_drawn_from_the_logits_that_the_token_before_corrects(
    tmp_path: Path, kind: str, tree: Tree
) -> None:
    """The negative controls are `WRONG`."""
    draft = drafted(drafter_of(tmp_path, kind, tree))
    assert draft.probs is not None
    paths, probs, errors = node_paths(draft), np.asarray(draft.probs[0]), dict.fromkeys(WRONG, 0.0)
    for node in tree.fed:
        path, size = paths[node], len(paths[node]) + 1
        np.testing.assert_allclose(probs[node], np.exp(after(path, kind)), atol=1e-5)
        for child in np.flatnonzero(np.asarray(draft.parents[0]) == node):
            own = float(draft.scores[0, child] - draft.scores[0, node])
            assert own == pytest.approx(after(path, kind)[paths[child][-1]], abs=1e-4)
        given = base()[:size], block()[:size]
        correction = reference.corrected(tensors(kind), *given, before(path), kind=kind)[-1] - base()[size - 1]
        wrong = (
            base()[size - 1],
            reference.corrected(tensors(kind), *given, (before(path) + 1) % VOCAB, kind=kind)[-1],
            base()[size - 2] + correction,
        )
        for name, logits in zip(WRONG, wrong, strict=True):
            errors[name] = max(errors[name], np.abs(np.exp(log_softmax(logits)) - probs[node]).max())
    assert min(errors.values()) > 0.01, errors


def test_recurrent_markov_head_carries_its_state_along_the_path_of_each_node(tmp_path: Path) -> None:
    """The control starts again from zeros at each node."""
    draft = drafted(drafter_of(tmp_path, "rnn", MIXED))
    assert draft.probs is not None
    for node in MIXED.fed:
        if path := node_paths(draft)[node]:
            size = len(path)
            alone = reference.corrected(
                tensors("rnn"), base()[size : size + 1], block()[size : size + 1], before(path)[-1:], kind="rnn"
            )
            assert np.abs(np.exp(log_softmax(alone[0])) - np.asarray(draft.probs[0, node])).max() > 1e-3


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_dynamic_tree_has_the_nodes_of_highest_joint_probability(tmp_path: Path, kind: str) -> None:
    """The oracle keeps the k best nodes of each level; the control leaves the correction out."""
    nodes, k = 14, 3
    draft = drafted(drafter_of(tmp_path, kind, Tree.topk(nodes, DEPTH, k)), "coupled")
    found = dict(zip(node_paths(draft)[1:], np.asarray(draft.scores[0, 1:]).tolist(), strict=True))
    right = best_paths(lambda path: after(path, kind), nodes, k)
    assert set(found) == set(right) and len(found) == nodes - 1
    np.testing.assert_allclose([found[path] for path in right], list(right.values()), atol=1e-4)
    assert set(best_paths(lambda path: log_softmax(base()[len(path)]), nodes, k)) != set(right)


def best_paths(log_probs: Any, nodes: int, k: int) -> dict[tuple[int, ...], float]:
    """Return the best paths by their joint log-probability, if the k best nodes of each level have k children."""
    level: dict[tuple[int, ...], float] = {(): 0.0}
    every: dict[tuple[int, ...], float] = {}
    for _ in range(DEPTH):
        children = {
            (*path, int(token)): score + log_probs(path)[token]
            for path, score in level.items()
            for token in np.argsort(-log_probs(path))[:k]
        }
        every |= children
        level = dict(sorted(children.items(), key=lambda item: -item[1])[:k])
    return dict(sorted(every.items(), key=lambda item: -item[1])[: nodes - 1])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_confidence_of_each_node_is_that_of_the_formula(tmp_path: Path, temperature: float) -> None:
    """Controls: states before the norm, the node's own token, another position, another temperature."""
    drafter = drafter_of(tmp_path, tree=MIXED)
    if temperature != 1.0:
        drafter = drafter.calibrated([temperature] * DEPTH)
    draft = drafted(drafter)
    assert draft.confidence is not None
    found, parents = np.asarray(draft.confidence[0]), np.asarray(draft.parents[0])
    paths, options = node_paths(draft), {"temperature": temperature}
    for node, path in enumerate(paths):
        if not path:
            assert found[node] == 1
            continue
        last = slice(len(path) - 1, len(path))
        parent = before(paths[parents[node]])[-1:]
        right = reference.confidences(tensors(), block()[last], parent, **options)[0]
        assert found[node] == pytest.approx(right, abs=1e-5)
        wrong = (
            reference.confidences(tensors(), block(normed=False)[last], parent, **options),
            reference.confidences(tensors(), block()[last], np.array(path[-1:]), **options),
            reference.confidences(tensors(), block()[[len(path) % DEPTH]], parent, **options),
            reference.confidences(tensors(), block()[last], parent, temperature=temperature + 1),
        )
        assert all(abs(other[0] - right) > 1e-3 for other in wrong if path[-1:] != tuple(parent))


def test_confidence_head_without_markov_embedding_reads_the_state_alone(tmp_path: Path) -> None:
    own = {**tensors(), "confidence_head.proj.weight": tensors()["confidence_head.proj.weight"][:, :HIDDEN]}
    folder = folders.write(tmp_path, {**CONFIG, "confidence_head_with_markov": False}, own)
    draft = drafted(DSpark.from_pretrained(folder, tree=Tree.chain(DEPTH)))
    assert draft.confidence is not None
    right = reference.confidences(own, block(), np.zeros(DEPTH, int), with_markov=False)
    np.testing.assert_allclose(draft.confidence[0, 1:], right, atol=1e-5)


def test_head_without_confidence_head_gives_none_and_cannot_be_calibrated(tmp_path: Path) -> None:
    own = {name: tensor for name, tensor in tensors().items() if not name.startswith("confidence")}
    drafter = DSpark.from_pretrained(folders.write(tmp_path, {**CONFIG, "enable_confidence_head": False}, own))
    assert drafted(drafter).confidence is None
    with pytest.raises(ValueError, match="temperatures: expected a head with a confidence head, got none"):
        drafter.calibrated([1.0] * DEPTH)


def test_head_with_a_confidence_head_alone_drafts_like_a_dflash_head_from_the_anchor(tmp_path: Path) -> None:
    own = {name: tensor for name, tensor in tensors().items() if not name.startswith("markov")}
    own["confidence_head.proj.weight"] = own["confidence_head.proj.weight"][:, :HIDDEN]
    config = {**CONFIG, "markov_rank": 0, "confidence_head_with_markov": False}
    draft = drafted(DSpark.from_pretrained(folders.write(tmp_path, config, own), tree=Tree.chain(DEPTH)))
    assert draft.probs is not None and draft.confidence is not None
    np.testing.assert_allclose(draft.probs[0, :-1], np.exp(log_softmax(base())), atol=1e-5)
    right = reference.confidences(own, block(), np.zeros(DEPTH, int), with_markov=False)
    np.testing.assert_allclose(draft.confidence[0, 1:], right, atol=1e-5)


# ---- recordings


def recorded_drafter(golden: Path, tmp_path: Path, kind: str) -> DSpark:
    """Return the recorded head, with the recorded weights of the kinds that were drawn at random."""
    folder = golden / "dspark/draft"
    if kind != "vanilla":
        config = {**json.loads((folder / "config.json").read_text()), "markov_head_type": kind}
        stored = {name: tensor.astype(np.float32) for name, tensor in folders.stored(folder).items()}
        recorded = recording(golden / f"dspark/{kind}.npz")
        stored |= {f"markov_head.{name}": recorded[name] for name in recorded if "proj" in name}
        folder = folders.write(tmp_path, config, stored)
    return DSpark.from_pretrained(folder, tree=Tree.chain(7), dtype="float32")


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_rounds_and_confidences_of_a_dspark_head_are_those_of_its_authors_code(
    golden: Path, tmp_path: Path, kind: str
) -> None:
    recorded = recording(golden / f"dspark/{kind}.npz")
    done = recordings.replay(recordings.engine_of(recorded_drafter(golden, tmp_path, kind)), golden, recorded)
    assert recordings.same_rounds(done, recorded) > 0.95 * len(recorded["accept_len"])
    assert recorded["accept_len"].mean() > 2, "the recorded head is trained"
    assert (recorded["base_tokens"] != recorded["tree_tokens"][:, 1:]).any(axis=1).mean() > 0.5, "corrections matter"
    rounds = [one for completion in done for one in completion.rounds or []]
    found = np.array([confidence_of(one)[1:] for one in rounds])
    np.testing.assert_allclose(found, reference.sigmoid(recorded["confidence_logits"]), atol=TOLERANCE)


def confidence_of(one: Round) -> np.ndarray:
    assert one.confidence is not None
    return one.confidence


@pytest.mark.parametrize("kind", KINDS)
def test_logits_before_and_after_the_correction_are_those_of_the_authors_code(
    golden: Path, tmp_path: Path, kind: str
) -> None:
    """The negative control lacks the newest token's features."""
    recorded, drafter = recording(golden / f"dspark/{kind}.npz"), recorded_drafter(golden, tmp_path, kind)
    model, at = tiny.load_target(byte_pair.TARGET), recorded["iter_offset"][DETAILED]
    size, tokens = int(recorded["prefix_len"][at]), recorded["tree_tokens"][at].tolist()
    features = recorded["features"][:size]
    params, kept, _ = prefilled(drafter, model, features)
    view = view_of_rows([tokens[0]], length=size)
    found, _ = drafter.run_block(params, kept, view)
    logits = np.asarray(reduce_partials(found.logits, jnp.float32)[0])
    np.testing.assert_allclose(logits, recorded["base_logits"][0], atol=TOLERANCE)
    corrected, state = [], params.markov.start(1)
    for depth, token in enumerate(tokens[:-1]):
        change, state = params.markov.correct(jnp.array([[token]]), found.hidden[:, depth], state, REFERENCE)
        corrected.append(logits[depth] + np.asarray(change[0, 0]))
    np.testing.assert_allclose(corrected, recorded["block_logits"][0], atol=TOLERANCE)
    np.testing.assert_array_equal(np.argmax(corrected, axis=-1), tokens[1:])
    other = computed(drafter, model, features[:-1], tokens[0])
    assert np.abs(other - recorded["base_logits"][0]).max() > 100 * TOLERANCE
