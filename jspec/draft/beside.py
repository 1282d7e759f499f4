"""Look-up beside a model: one draft of a head's tokens and of tokens that followed the newest ones earlier.

Both parts read the committed text alone, and a round verifies their tokens in one pass. "replace" chooses one of two
chains for each row. "beside" joins the chain of the look-up to the tree of the head:

    head:    root - a - b - c      look-up after a match:  a b x y
    joined:  root - a - b - c
                         \\- x - y

The beginning that both have is one path, and the rest hangs below the last node of this path, numbered after the head's
nodes. So rules that try siblings in the order of their numbers try those first that the head drew. A token that both
have is one node, and this is exact only in this order: a drawn token that was rejected has no probability left, but one
that was tried as a point mass leaves a rest of which the head's other tokens were not drawn.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from jspec.core.ancestors import ancestors, depths, longest_accepted_path
from jspec.core.foreign_names import keywords_checked
from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.core.shorten import short
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, DraftState, NoDraft, Params, check_layer_windows, check_window
from jspec.draft.best_nodes import keep_best_nodes
from jspec.draft.draft_model import DraftModel
from jspec.draft.eagle import EagleDrafter
from jspec.draft.lookup import Found, LookupDrafter, LookupState
from jspec.draft.match_rates import MatchRates, expected_length, kind_of
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape

JOINS = ("replace", "beside")


@struct.dataclass
class BesideState:
    """The states of both parts, and how often their tokens were right."""

    model: DraftState
    lookup: LookupState
    rates: MatchRates


@final
class Beside(Drafter):
    """Drafts with a head, and with a look-up where it finds a match.

    join="replace": in some rows the look-up's chain replaces the head's. A round verifies as many nodes as the longer
    chain has. By default these are the rows in which more tokens of the look-up than of the head are right on average,
    by what the request's own rounds had so far at matches of about this length (`MatchRates`).
    join="beside": the look-up's chain joins the head's tree, and a round verifies the nodes of both. A node costs time
    in large batches; with a limit a round verifies the nodes of both parts that are most probable, by the head's
    probabilities and the learned rates of the look-up.

    A round of an 8B model with a chain of 4 by an EAGLE-3 head takes 5.04, 5.67 and 7.34 ms on an H200 at batch 1, 8
    and 32; with "replace" 5.09, 5.71 and 7.36, with "beside" and a look-up of ten tokens 5.16, 6.26 and 15.1.

    Args:
        model: head that drafts: any drafter but a `DraftModel` and a look-up. With "replace" it drafts a chain.
        lookup: `NGram` or `Suffix` that drafts a chain.
        join: "replace" or "beside".
        threshold: smallest length of a match in tokens of which the continuation is drafted; None: of any match with
            "beside", and with "replace" by the learned rates.
        nodes: most nodes that a round verifies in each row with "beside", the root included; None: all. The head's
            tokens may not be drawn at random: the accept rule is "coupled", "multi_candidate" or "typical", or the tree
            dynamic.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the drafters, their trees, the threshold or the nodes do not fit together.
        NotImplementedError: the model is a `DraftModel`.

    Source: the "replace" join is that of TensorRT-LLM's suffix automaton; the order of siblings of the "beside" join is
        that of rejection sampling without replacement (arXiv:2402.14160).
    """

    reads_text = True
    reads_predictions = True

    @keywords_checked
    def __init__(
        self,
        model: Drafter,
        lookup: LookupDrafter,
        join: str = "replace",
        *,
        threshold: int | None = None,
        nodes: int | None = None,
    ) -> None:
        _check_parts(model, lookup, join)
        self.model = model
        self.lookup = lookup
        self.join = join
        longest = max(model.tree.depth, lookup.tree.depth)
        self.nodes = _check_nodes(nodes, join)
        self.tree = Tree.chain(longest) if join == "replace" else model.tree.joined(lookup.tree.depth, nodes)
        self.threshold = _check_threshold(threshold, lookup.min_n, lookup.max_n)
        self.has_pending_rows, self.reads_target = model.has_pending_rows, model.reads_target
        self.draft_window = check_window("Beside", model.draft_window, None if model.reads_target else self.tree)
        if isinstance(model, EagleDrafter):  # a pass may write the rows of as many pending tokens as the tree is deep
            check_layer_windows("Beside: a layer of the head", model.head.config, self.tree)

    def __repr__(self) -> str:
        nodes = "" if self.nodes is None else f", nodes={self.nodes}"
        return f"Beside({self.model!r}, {self.lookup!r}, {self.join!r}, threshold={self.threshold}{nodes})"

    @property
    def advice(self) -> str | None:
        return self.model.advice

    @property
    def sources(self) -> dict[str, str]:
        return {"head": type(self.model).__name__, "lookup": type(self.lookup).__name__}

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return self.model.feature_layers(target)

    def bind(self, target: Model) -> Params:
        return self.model.bind(target)  # a look-up has no weights

    def with_window(self, draft_window: int) -> Beside:
        return self._with(self.model.with_window(draft_window))

    def on_mesh(self, mesh: Mesh) -> Beside:
        return self._with(self.model.on_mesh(mesh))

    def _with(self, model: Drafter) -> Beside:
        return Beside(model, self.lookup, self.join, threshold=self.threshold, nodes=self.nodes)

    def init(self, params: Params, pool: PoolShape) -> BesideState:
        deeper = copy.copy(self.model)
        object.__setattr__(deeper, "tree", self.tree)  # a round may commit more tokens than the model drafts
        rates = MatchRates.new(pool.slots, 2 if self.join == "replace" else 1, self.tree.depth)
        return BesideState(deeper.init(params, pool), self.lookup.init((), pool), rates)

    def prefill(
        self, params: Params, state: BesideState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> BesideState:
        return BesideState(
            self.model.prefill(params, state.model, view, batch, features),
            self.lookup.prefill((), state.lookup, view, batch, None),
            state.rates.forget(view.slots),
        )

    def draft(self, params: Params, state: BesideState, view: SlotView) -> tuple[Draft, BesideState]:
        deepest = self.tree.depth
        model = self.model.cut(min(deepest, self.model.tree.depth))
        lookup = self.lookup.cut(min(deepest, self.lookup.tree.depth))
        drafted, model_state = model.draft(params, state.model, view)
        with jax.named_scope("look_up"):
            found, lookup_state = lookup.look_up(state.lookup, view)
            draft, rates = self._together(drafted, found, state.rates, view)
        return replace(draft, match_length=found.length), BesideState(model_state, lookup_state, rates)

    def _together(self, drafted: Draft, found: Found, rates: MatchRates, view: SlotView) -> tuple[Draft, MatchRates]:
        """Join both drafts, of which a look-up's scores become those of its rate, and keep the chains to compare."""
        depth, chain, kind = self.tree.depth, found.draft, kind_of(found.length)
        rate = rates.of(view.slots, kind)
        chain = replace(chain, scores=jnp.log(rate[:, :1]) * np.arange(chain.tokens.shape[1]))
        sources = (chain, drafted) if self.join == "replace" else (chain,)
        rates = rates.keep(view, jnp.stack([_chain(source, rates.chains.shape[2]) for source in sources], axis=1), kind)
        is_used = found.length >= (self.threshold or 1)
        if self.join == "beside":
            both = joined(drafted, chain, is_used)
            if self.tree.nodes < both.tokens.shape[1]:
                both = keep_best_nodes(both, self.tree.nodes, view.implementation)
            return both, rates
        if self.threshold is None:
            counts = (jnp.sum(source.valid[:, 1:], axis=1) for source in sources)
            match, head = (expected_length(rate[:, at], count, depth) for at, count in enumerate(counts))
            is_used &= match > head
        return replaced(drafted, chain, is_used), rates

    def commit(
        self,
        params: Params,
        state: BesideState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> BesideState:
        return BesideState(
            self.model.commit(params, state.model, view, draft, verdict, features),
            self.lookup.commit((), state.lookup, view, draft, verdict, None),
            state.rates.learn(view, verdict) if self.tree.depth else state.rates,  # without a draft there is no chain
        )

    def write_pending_rows(self, params: Params, state: BesideState, view: SlotView) -> BesideState:
        return BesideState(
            self.model.write_pending_rows(params, state.model, view),
            self.lookup.write_pending_rows((), state.lookup, view),
            state.rates,
        )


def replaced(drafted: Draft, chain: Draft, is_used: Bool[Array, "batch"]) -> Draft:
    """Replace the chains of some rows by the continuation of a match.

    The tokens of these rows are point masses, because their rows of ``probs`` are zeros. All count as the look-up's.

    Args:
        drafted: chains of the model.
        chain: chains of the look-up.
        is_used: rows to replace, which depend on nothing that this round draws.
    """
    rows, nodes = len(is_used), max(drafted.tokens.shape[1], chain.tokens.shape[1])

    def choose(mine: Array, others: Array) -> Array:
        mine, others = _pad(mine, nodes), _pad(others, nodes)
        return jnp.where(is_used.reshape(rows, *(1,) * (mine.ndim - 1)), others, mine)

    return Draft(
        tokens=choose(drafted.tokens, chain.tokens),
        parents=np.tile(np.arange(-1, nodes - 1, dtype=np.int32), (rows, 1)),
        scores=choose(drafted.scores, chain.scores),
        valid=choose(drafted.valid, chain.valid),
        probs=None if drafted.probs is None else choose(drafted.probs, jnp.zeros_like(drafted.probs)),
        vocab_map=drafted.vocab_map,
        confidence=None if drafted.confidence is None else choose(drafted.confidence, _confidence(chain)),
        from_lookup=is_used[:, None] & (np.arange(nodes) > 0),
    )


def joined(drafted: Draft, chain: Draft, is_used: Bool[Array, "batch"]) -> Draft:
    """Join the continuation of a match to the model's tree, in some rows.

    Its beginning is the longest path of the tree with the same tokens, at least the root. The other tokens become a
    branch below, one node each, with numbers after those of the tree. A node whose token is on the path is padding, so
    a token that both drafted counts as the model's. Such a node has the higher of both scores.

    Args:
        drafted: trees of the model.
        chain: chains of the look-up.
        is_used: rows whose chain is joined, which depend on nothing that this round draws.
    """
    mask = ancestors(drafted.parents)
    depth, (rows, size), length = depths(mask), drafted.tokens.shape, chain.tokens.shape[1] - 1
    valid = chain.valid & is_used[:, None]
    place = jnp.minimum(depth, length)
    agrees = drafted.tokens == jnp.take_along_axis(chain.tokens, place, axis=1)
    agrees &= jnp.take_along_axis(valid, place, axis=1) & (depth <= length) & drafted.valid
    is_common, last = longest_accepted_path(agrees, drafted, mask)
    both = jnp.maximum(drafted.scores, jnp.take_along_axis(chain.scores, place, axis=1))
    drafted = replace(drafted, scores=jnp.where(is_common, both, drafted.scores))
    common = jnp.take_along_axis(depth, last[:, None], axis=1)
    steps = np.arange(1, length + 1)
    is_new = valid[:, 1:] & (steps > common)
    before = jnp.where(steps == common + 1, last[:, None], size - 2 + steps)
    at_last = jnp.take_along_axis(drafted.scores, last[:, None], axis=1)
    scores = at_last + chain.scores[:, 1:] - jnp.take_along_axis(chain.scores, common, axis=1)

    from_lookup = jnp.tile(np.arange(size + length) >= size, (rows, 1))

    def together(mine: Array | np.ndarray, others: Array) -> Array:
        return jnp.concatenate([mine, others.astype(mine.dtype)], axis=1)

    return Draft(
        tokens=together(drafted.tokens, chain.tokens[:, 1:]),
        parents=together(drafted.parents, jnp.where(is_new, before, -1)),
        scores=together(drafted.scores, jnp.where(is_new, scores, 0.0)),
        valid=together(drafted.valid, is_new),
        probs=None if drafted.probs is None else _pad(drafted.probs, size + length),
        vocab_map=drafted.vocab_map,
        confidence=None if drafted.confidence is None else together(drafted.confidence, _confidence(chain)[:, 1:]),
        drawn=None if drafted.probs is None else ~from_lookup,
        from_lookup=from_lookup,
    )


def _chain(draft: Draft, depth: int) -> Int[Array, "batch depth"]:
    """Return the tokens of a chain after the root; -1 after its end."""
    tokens = jnp.where(draft.valid, draft.tokens, -1)[:, 1:]
    return jnp.pad(tokens, ((0, 0), (0, depth - tokens.shape[1])), constant_values=-1)


def _confidence(chain: Draft) -> Float[Array, "batch nodes"]:
    """Return the probability of each token of a chain after the token before."""
    return jnp.exp(jnp.diff(chain.scores, axis=1, prepend=0.0))


def _pad(field: Shaped[Array, "batch nodes ..."], nodes: int) -> Shaped[Array, "batch more ..."]:
    """Append zeros until there are ``nodes`` nodes."""
    return jnp.pad(field, [(0, 0), (0, nodes - field.shape[1])] + [(0, 0)] * (field.ndim - 2))


def _check_parts(model: object, lookup: object, join: object) -> None:
    """Raise an error unless two drafters can be joined."""
    heads = "a head (Eagle3, Eagle, PEagle, MTP, DFlash, DSpark or Medusa)"
    if isinstance(model, DraftModel):
        raise NotImplementedError(
            f"Beside: model: expected {heads}, got a DraftModel, whose cache would lack the rows of accepted tokens "
            "that the look-up drafted; take a head, or the DraftModel alone"
        )
    if isinstance(model, Drafter) and model.writes_target:
        raise NotImplementedError(
            f"Beside: model: expected {heads}, got {model!r}, which drafts in the target's caches; take it alone"
        )
    if not isinstance(model, Drafter) or isinstance(model, (LookupDrafter, Beside, NoDraft)):
        raise TypeError(f"Beside: model: expected {heads}, got {short(model)}")
    if not isinstance(lookup, LookupDrafter):
        raise TypeError(f"Beside: lookup: expected NGram(tree) or Suffix(tree), got {short(lookup)}")
    if lookup.tree != Tree.chain(lookup.tree.depth):
        raise ValueError(
            f"Beside: lookup: expected a look-up that drafts a chain, got {lookup.tree}; pass "
            f"{type(lookup).__name__}(Tree.chain({lookup.tree.depth}))"
        )
    if join not in JOINS:
        raise ValueError(f"Beside: join: expected one of {JOINS}, got {short(join)}")
    if join == "replace" and model.tree != Tree.chain(model.tree.depth):
        raise ValueError(
            f'Beside: join="replace" expects a model that drafts a chain, got {model.tree}; pass Tree.chain('
            f'{model.tree.depth}) to the model, or join="beside"'
        )


def _check_nodes(nodes: int | None, join: str) -> int | None:
    """Return a number of nodes that a round verifies in each row."""
    is_int = isinstance(nodes, int) and not isinstance(nodes, bool)
    if nodes is not None and not (is_int and nodes >= 2 and join == "beside"):
        raise ValueError(
            f'Beside: nodes: expected None, or an int >= 2 with join="beside", got {short(nodes)} with join="{join}"; '
            "leave it out, or change either"
        )
    return nodes


def _check_threshold(threshold: int | None, least: int, most: int) -> int | None:
    """Return a threshold of match lengths, of which the look-up has ``least`` to ``most``."""
    is_int = isinstance(threshold, int) and not isinstance(threshold, bool)
    if threshold is not None and not (is_int and least <= threshold <= most):
        raise ValueError(
            f"Beside: threshold: expected None or an int from {least} to {most}, the look-up's min_n and max_n, got "
            f"{short(threshold)}"
        )
    return threshold
