"""Runs of n-gram and suffix drafters without a target that compare each draft with the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.numerics import REFERENCE
from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.draft import prediction
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix
from jspec.models.parts.kv_pool import PoolShape
from jspec.verify import Coupled
from tests.reference.lookup import Node, Predicted, TextMatch, best_matches, expected_nodes
from tests.support.arrays import on_device

SLOTS, MAX_LEN, BUCKET, ROWS = 3, 40, 5, 6  # ROWS: rows of a block
POOL = PoolShape(slots=SLOTS, pages=9, page_size=16, max_len=MAX_LEN, dtype="float32", draft_dtype="float32")
CORPUS = 30


class LookupRun:
    """A run of a drafter that updates its state as an engine would, and also keeps the texts in lists."""

    def __init__(self, drafter: NGram | Suffix, *, predicted: int = 0) -> None:
        """Begin a run.

        Args:
            predicted: largest number of predicted tokens.
        """
        self.drafter = drafter
        self.state = drafter.init((), replace(POOL, predicted_tokens=predicted))
        self.predictions = prediction.unused(SLOTS, predicted) if predicted else None
        self.predicted: list[list[int]] = [[] for _ in range(SLOTS)]
        self.prompt_sizes, self.reached = [0] * SLOTS, [0] * SLOTS
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]  # one entry per slot
        self.lengths, self.roots, self.active = [0] * SLOTS, [0] * SLOTS, [False] * SLOTS
        self.corpus: list[int] = []
        self._prefill = jax.jit(lambda s, v, b: drafter.prefill((), s, v, b, None), donate_argnums=0)
        self._draft = jax.jit(lambda s, v: drafter.draft((), s, v), donate_argnums=0)
        self._commit = jax.jit(lambda s, v, d, t: drafter.commit((), s, v, d, t, None), donate_argnums=0)

    def prompt(self, slot: int, tokens: list[int], root: int, predicted: list[int] | None = None) -> None:
        if self.predictions is not None:
            self.predict(slot, len(tokens), predicted or [])
        self.prompts((slot, tokens, root))

    def predict(self, slot: int, prompt_size: int, tokens: list[int]) -> None:
        """Enter the prediction of a new request."""
        assert self.predictions is not None
        size = self.predictions.tokens.shape[1]
        packed = prediction.pack(slot, prompt_size, tokens, size)
        self.predictions = prediction.load(self.predictions, on_device(packed))
        self.predicted[slot], self.prompt_sizes[slot], self.reached[slot] = tokens, prompt_size, 0

    def prompts(self, *new: tuple[int, list[int], int]) -> None:
        """Start new requests (slot, prompt, root) of different slots together; a piece has up to two blocks."""
        for slot, tokens, root in new:
            if self.texts[slot]:
                self.corpus = (self.corpus + self.texts[slot] + [-1])[-CORPUS:]
            self.texts[slot], self.lengths[slot], self.roots[slot] = list(tokens), len(tokens), root
            self.active[slot] = True
        for start in range(0, max(len(tokens) for _, tokens, _ in new), 2 * ROWS):
            pieces = [(slot, tokens[start : start + 2 * ROWS]) for slot, tokens, _ in new if start < len(tokens)]
            slots = [slot for slot, _ in pieces] + [SLOTS] * (SLOTS - len(pieces))
            view = self.view(slots, [start] * SLOTS, [0] * SLOTS, [slot < SLOTS for slot in slots])
            self.state = self._prefill(self.state, view, batch_of([own for _, own in pieces], start))

    def draft(self, slots: list[int]) -> tuple[Draft, SlotView]:
        """Draft for some slots and check every row; the slot number `SLOTS` marks a padding row."""
        live = [slot < SLOTS and self.active[slot] for slot in slots]
        lengths = [self.lengths[s] if on else 0 for s, on in zip(slots, live, strict=True)]
        roots = [self.roots[s] if s < SLOTS else 0 for s in slots]
        view = self.view(slots, lengths, roots, live)
        for slot, on in zip(slots, live, strict=True):
            if on:
                self.texts[slot] = [*self.texts[slot][: self.lengths[slot]], self.roots[slot]]
        draft, self.state = self._draft(self.state, view)
        for row, (slot, on) in enumerate(zip(slots, live, strict=True)):
            nodes, scores = self.expected(slot) if on else ([], [])
            check_row(draft, row, roots[row], nodes, scores)
        return draft, view

    def view(self, *fields: list[Any]) -> SlotView:
        return view_of(*fields).replace(predictions=self.predictions)

    def expected(self, slot: int) -> tuple[list[Node], list[float]]:
        return expected_nodes(self.best(slot), self.drafter)

    def best(self, slot: int) -> list[TextMatch]:
        predicted = None
        if self.predictions is not None:
            output = self.texts[slot][self.prompt_sizes[slot] :]
            predicted = Predicted(self.predicted[slot], output, self.reached[slot])
        if getattr(self.drafter, "scope", "request") == "request":
            return best_matches([self.texts[slot]], 0, self.drafter, predicted)
        old, text = [], []
        for token in self.corpus:
            if token < 0:
                old.append(text)
                text = []
            else:
                text.append(token)
        return best_matches(old + self.texts, len(old) + slot, self.drafter, predicted)

    def follow(self, slot: int, emitted: list[int]) -> None:
        """Move the place in the prediction after the emitted tokens, if the tried ones were right."""
        best, tokens, tried = self.best(slot), self.predicted[slot], self.reached[slot]
        if best and best[0].is_predicted and best[0].length:
            tried = len(tokens) - len(best[0].tail)
        right = 0
        while right < len(emitted) and tokens[tried + right : tried + right + 1] == emitted[right : right + 1]:
            right += 1
        self.reached[slot] = tried + right if right else self.reached[slot]

    def step(self, slots: list[int], emitted: list[list[int]]) -> Draft:
        """Draft and commit; inactive rows emit tokens too, which must not be kept."""
        draft, view = self.draft(slots)
        tokens = np.full((len(slots), self.drafter.tree.depth + 1), -1, np.int32)
        for row, (slot, new) in enumerate(zip(slots, emitted, strict=True)):
            tokens[row, : len(new)] = new
            if view.active[row]:
                self.follow(slot, new)
                self.texts[slot] += new
                self.lengths[slot] += len(new)
                self.roots[slot] = new[-1]
        verdict = Verdict(accept_len=None, path=None, tokens=on_device(tokens), counts=None, ended=None)
        self.state = self._commit(self.state, view, draft, verdict)
        return draft


def batch_of(pieces: list[list[int]], start: int) -> PromptBatch:
    """Return pieces that begin at position ``start``; padding rows have tokens too."""
    blocks = [(index, at, own[at : at + ROWS]) for index, own in enumerate(pieces) for at in range(0, len(own), ROWS)]
    blocks += [(SLOTS, 0, [])] * (2 * SLOTS - len(blocks))
    first_row = on_device([start + at for _, at, _ in blocks])
    counts = on_device([len(own) for own in pieces] + [0] * (SLOTS - len(pieces)))
    return PromptBatch(
        tokens=on_device([own + [1] * (ROWS - len(own)) for *_, own in blocks]),
        positions=first_row[:, None] + on_device(np.arange(ROWS)),
        valid=on_device(np.arange(ROWS)) < on_device([len(own) for *_, own in blocks])[:, None],
        first_row=first_row,
        page_table=None,
        bits=None,
        numerics=REFERENCE,
        piece=jnp.array([index for index, *_ in blocks]),
        starts=on_device(np.full(SLOTS, start)),
        ends=start + counts,
        newest=None,
    )


def view_of(slots: list[int], lengths: list[int], roots: list[int], active: list[bool]) -> SlotView:
    return SlotView(
        slots=on_device(slots, jnp.int32),
        root=on_device(roots, jnp.int32),
        lengths=on_device(lengths, jnp.int32),
        active=on_device(active),
        remaining=None,
        page_table=None,
        sampling=None,
        accept=Coupled(),
        all_greedy=False,
        numerics=REFERENCE,
    )


def check_row(draft: Draft, row: int, root: int, nodes: list[Node], scores: list[float]) -> None:
    """Check that a row of a draft is the root, the expected nodes in order, then padding."""
    padding = draft.tokens.shape[1] - 1 - len(nodes)
    assert draft.probs is None and draft.vocab_map is None
    assert draft.valid[row].tolist() == [True] * (1 + len(nodes)) + [False] * padding
    assert draft.parents[row].tolist() == [-1, *(parent for parent, _, _ in nodes)] + [-1] * padding
    assert draft.tokens[row].tolist() == [root, *(token for _, token, _ in nodes)] + [0] * padding
    np.testing.assert_allclose(draft.scores[row], [0.0, *scores] + [0.0] * padding, atol=1e-6)


def run_random_requests(drafter: NGram | Suffix, *, seed: int = 0, steps: int = 60, predicted: int = 0) -> int:
    """Start, continue, end and replace requests of random tokens from small alphabets, checking every draft.

    Args:
        predicted: largest number of predicted tokens. Half of the requests then have a prediction, which outputs follow
            for a while, leave, and come back to.

    Returns:
        The number of drafted tokens.
    """
    rng, run = np.random.default_rng(seed), LookupRun(drafter, predicted=predicted)
    drafted = 0

    def tokens(count: int) -> list[int]:
        return rng.integers(0, alphabet, count).tolist()

    for step in range(steps):
        alphabet = int(rng.integers(2, 5))
        slot = step if step < SLOTS else int(rng.integers(0, SLOTS))
        if step < SLOTS or rng.random() < 0.3:
            others = [other for other in range(SLOTS) if other != slot and run.texts[other] and rng.random() < 0.3]
            new = [(one, tokens(int(rng.integers(1, 16))), tokens(1)[0]) for one in (slot, *others)]
            for one, prompt, root in new if predicted else ():
                size = int(rng.integers(1, predicted + 1)) if rng.random() < 0.5 else 0
                run.predict(one, len(prompt), ([root] * (rng.random() < 0.5) + tokens(size))[:size])
            run.prompts(*new)
        elif rng.random() < 0.1:
            run.active[slot] = False
        most = drafter.tree.depth + 1
        full = [s for s in range(SLOTS) if run.lengths[s] + most >= MAX_LEN]
        slots = [s for s in rng.permutation(SLOTS).tolist() if s not in full] + [SLOTS] * (BUCKET - SLOTS + len(full))
        emitted = [tokens(int(rng.integers(1, most + 1))) for _ in slots]
        for slot, new in zip(slots, emitted, strict=True):
            if predicted and slot < SLOTS and rng.random() < 0.6:
                at = run.reached[slot] + int(rng.integers(0, 3))
                new[:-1] = run.predicted[slot][at : at + len(new) - 1]
        draft = run.step(slots, emitted)
        drafted += int(draft.valid[:, 1:].sum())
    return drafted
