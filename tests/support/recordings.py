"""Recorded rounds of the drafting methods' own code, and their comparison with an engine's rounds."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import numpy as np

from jspec import Completion, Drafter, Engine, Model, SamplingParams
from jspec.engine.request.round_record import Round
from jspec.tools.replay import run_texts
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device

TOLERANCE = 1e-4  # float32 sums in another order; a second implementation of the recordings' authors differs by 8e-6
NEAR_TIE = 1e-5  # below this margin another correct implementation may choose differently


@cache
def recording(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as arrays:
        return dict(arrays)


def most_likely(target: Model, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[int]]:
    """Return the target's most likely token at the place of each token after each prompt, in one forward pass."""
    texts = [prompt + after for prompt, after in zip(prompts, tokens, strict=True)]
    padded = np.array(list(itertools.zip_longest(*texts, fillvalue=0)), np.int32).T  # no row sees the tokens after it
    choices = np.argmax(run_texts(target, on_device(padded)).logits, axis=-1)
    return [
        row[len(prompt) - 1 : len(text) - 1].tolist() for row, prompt, text in zip(choices, prompts, texts, strict=True)
    ]


def engine_of(drafter: Drafter) -> Engine:
    """Return an engine with the recordings' target and a drafter."""
    target = tiny.load_target(byte_pair.TARGET)
    options = dict(slots=4, max_len=512, buckets=(4,), prefill_buckets=(128,), prefix_cache=False, controls=False)
    return Engine(target, drafter=drafter, **options)


def replay(engine: Engine, golden: Path, recorded: dict[str, np.ndarray]) -> list[Completion]:
    """Generate as many tokens for each recorded prompt as were recorded, and trace the rounds."""
    lengths = np.diff(recorded["out_offset"]) + 1
    params = [SamplingParams(max_tokens=int(n), temperature=0) for n in lengths]
    return engine.generate(tiny.recorded_prompts(golden), params, trace=True)


def same_rounds(completions: list[Completion], recorded: dict[str, np.ndarray]) -> int:
    """Compare an engine's rounds with recorded ones; return the number of rounds compared in full."""
    compared = 0
    for prompt, completion in enumerate(completions):
        first, last = recorded["iter_offset"][prompt : prompt + 2]
        assert completion.rounds is not None
        assert len(completion.rounds) == last - first
        for index, got in zip(range(first, last), completion.rounds, strict=True):
            assert got.accept_len == recorded["accept_len"][index]
            if "bonus" in recorded:
                assert got.emitted[-1] == recorded["bonus"][index]
            if margin(recorded, index) >= NEAR_TIE:
                same_tree(got, recorded, index)
                compared += 1
        a, b = recorded["out_offset"][prompt : prompt + 2]
        assert completion.token_ids[:-1] == recorded["output"][a:b].tolist()
    return compared


def margin(recorded: dict[str, np.ndarray], index: int) -> float:
    """Return the smallest margin of a round's choices."""
    margins = [recorded[name][index].min() for name in ("rerank_margin", "level_margin") if name in recorded]
    return min([np.inf, *margins])


def same_tree(got: Round, recorded: dict[str, np.ndarray], index: int) -> None:
    """Compare tokens, parents, scores, depths and the accepted path of one round."""
    parents = recorded["parent"] if recorded["parent"].ndim == 1 else recorded["parent"][index]
    np.testing.assert_array_equal(got.tokens, recorded["tree_tokens"][index])
    np.testing.assert_array_equal(got.parents, parents)
    depth = np.zeros(len(parents), int)
    for node, parent in enumerate(parents[1:], 1):
        depth[node] = depth[parent] + 1
    positions = recorded["tree_pos"] if recorded["tree_pos"].ndim == 1 else recorded["tree_pos"][index]
    np.testing.assert_array_equal(depth, positions)
    assert [depth[node] for node in got.path] == list(range(got.accept_len + 1))
    if "sel_scores" in recorded:
        np.testing.assert_allclose(got.scores[1:], recorded["sel_scores"][index], atol=TOLERANCE)
