"""Scores of the nodes that an engine drafted from the distributions of a block, compared with an oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

from jspec import Completion, Model
from jspec.engine.request.round_record import Round
from jspec.tools.replay import run_texts
from tests.support.arrays import on_device

run = jax.jit(run_texts, static_argnums=2)


def states_of(target: Model, text: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """Return the target's hidden states at the tokens of a text, concatenated [tokens, states * hidden]."""
    order = sorted(set(layers))
    padded = np.pad(text, (0, -len(text) % 64))[None]  # texts of different lengths share a program
    found = np.asarray(run(target, on_device(padded, np.int32), tuple(order)).features, np.float64)[0, : len(text)]
    seen = np.split(found, len(order), axis=-1)
    return np.concatenate([seen[order.index(layer)] for layer in layers], axis=-1)


def texts(done: Completion, prompt: list[int]) -> Iterator[tuple[Round, list[int]]]:
    """Yield each round of a traced completion, with the text before it; the text's last token is the root."""
    text = [*prompt, done.token_ids[0]]
    for one in done.rounds or []:
        yield one, text
        text = [*text, *map(int, one.emitted)]


def score_differences(
    done: Completion, prompt: list[int], logits_of: Callable[[list[int]], np.ndarray], ids: np.ndarray
) -> np.ndarray:
    """Return the difference between the engine's score and the oracle's for each drafted node of a traced completion.

    Args:
        done: completion with rounds.
        prompt: prompt of the completion.
        logits_of: oracle: function of a text, whose last token is the root, that returns the logits of the tokens at
            each depth [depth, draft_vocab].
        ids: target id of each draft id.
    """
    found, draft_id = [], {int(target): i for i, target in enumerate(ids)}
    for one, text in texts(done, prompt):
        logits = logits_of(text)
        shifted = logits - logits.max(-1, keepdims=True)
        log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        for node in range(1, len(one.tokens)):
            path, at = [], node
            while at > 0:
                path, at = [int(one.tokens[at]), *path], int(one.parents[at])
            score = sum(log_probs[depth, draft_id[token]] for depth, token in enumerate(path))
            found.append(one.scores[node] - score)
    assert len(found) > 20
    return np.array(found)
