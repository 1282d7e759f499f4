"""Compare DFlash heads whose layers have sliding windows with the formulas and with SpecForge's code."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Completion, DFlash, Engine, SamplingParams, Tree
from jspec.draft.formats.dflash_format import read_dflash
from jspec.draft.head_config import DFlashConfig
from jspec.tools import info
from tests.draft import test_dflash
from tests.draft.test_dflash import ROOT, TOKENS, computed, states, target, tensors_of
from tests.reference import dflash as reference
from tests.support import block_rounds, folders
from tests.support.arrays import on_device
from tests.support.recordings import TOLERANCE, recording

pytestmark = pytest.mark.once

WINDOW = 6
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
CONFIG = {**test_dflash.CONFIG, **SLIDING}
PROMPT, IDS = np.random.default_rng(4).integers(0, 39, 4 * WINDOW).tolist(), np.arange(40)
LONGER = [*PROMPT, 5, 6]  # its first pages are those of the prompt
TREES = {"chain": Tree.chain(5), "tree": Tree.topk(12, 4, 3)}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> DFlash:
    return DFlash.from_pretrained(
        folders.write(tmp_path_factory.mktemp("dflash"), CONFIG, tensors_of()), tree="chain:5"
    )


def expected(config: dict[str, Any] = CONFIG, features: np.ndarray | None = None, **options: Any) -> np.ndarray:
    model, own = target(), states() if features is None else features
    embed, output = np.asarray(model.embed), np.asarray(model.output_head, np.float64)
    root, depth = options.pop("root", ROOT), options.pop("depth", 5)
    return reference.block_logits(config, tensors_of(), embed, own, root, depth, output=output, **options)


def test_block_of_a_head_with_windows_has_the_logits_of_the_formulas(drafter: DFlash) -> None:
    """Controls: a window of one token more or less, and layers with windows whose tokens see later tokens."""
    assert TOKENS > WINDOW
    found, right = computed(drafter, target(), states()), expected()
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    wider, narrower = ({**CONFIG, "sliding_window": WINDOW + step} for step in (1, -1))
    for control in (expected(wider), expected(narrower), expected(causal=False), expected(causal=True)):
        assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


def test_block_whose_windows_let_tokens_see_later_ones_has_the_logits_of_the_formulas(tmp_path: Path) -> None:
    """The window of each token ends at the token. Controls: another window, and the mask of a causal layer."""
    nested = {**CONFIG["dflash_config"], "use_swa": True, "swa_window_size": WINDOW, "causal": False}
    config = {**test_dflash.CONFIG, "dflash_config": nested}
    drafter = DFlash.from_pretrained(folders.write(tmp_path, config, tensors_of()), tree=Tree.chain(5))
    windows = {**CONFIG, "layer_types": ["sliding_attention"] * 2}
    found, right = computed(drafter, target(), states()), expected(windows, causal=False)
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    wider = {**windows, "sliding_window": WINDOW + 1}
    for control in (expected(wider, causal=False), expected(windows), expected(causal=False)):
        assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


def test_block_of_a_recorded_head_with_windows_is_that_of_specforge(golden: Path) -> None:
    """The negative control has a window of one token less in two of the three layers."""
    recorded = recording(golden / "dflash/windows/block6.npz")
    drafter = DFlash.from_pretrained(golden / "dflash/windows/draft", tree="chain:5")
    assert drafter.head.config.windows == [8, 8] and len(recorded["features"]) == 20
    model = target().replace(embed=on_device(recorded["embed"]), head=on_device(recorded["head"]))
    found = computed(drafter, model, recorded["features"], int(recorded["root"]))
    np.testing.assert_allclose(found, recorded["block_logits"], atol=TOLERANCE)
    assert (found.argmax(-1) == recorded["block_logits"].argmax(-1)).all()
    narrow = DFlash(drafter.head, drafter.tree, draft_window=7)
    other = computed(narrow, model, recorded["features"], int(recorded["root"]))
    assert np.abs(other - recorded["block_logits"]).max() > 50 * TOLERANCE


def completions(drafter: DFlash | None, tree: Tree, page_size: int) -> list[Completion]:
    """Decode a prompt, and then the prompt with more tokens, whose first pages are in the prefix cache."""
    options: dict[str, Any] = dict(slots=1, max_len=64, page_size=page_size, prefill_buckets=(8,), buckets=(1,))
    drafter = drafter and DFlash(drafter.head, tree)
    with Engine(target(), drafter=drafter, **options) as engine:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        found = [engine.generate(prompt, params, trace=True)[0] for prompt in (PROMPT, LONGER)]
    assert found[1].metrics.num_cached_tokens >= len(PROMPT) - page_size
    return found


@cache
def plain_completions() -> list[Completion]:
    return completions(None, TREES["chain"], page_size=8)


@pytest.mark.parametrize(("tree", "page_size"), [("chain", 1), ("tree", 8)])
def test_engine_with_windows_emits_plain_tokens_and_drafts_by_the_formulas(
    drafter: DFlash, tree: str, page_size: int
) -> None:
    """The texts are longer than the window; with a window of one token more, scores of drafted nodes differ."""

    plain, depth = plain_completions(), TREES[tree].depth
    found = completions(drafter, TREES[tree], page_size)
    assert [own.token_ids for own in found] == [own.token_ids for own in plain]
    for own, prompt in zip(found, (PROMPT, LONGER), strict=True):
        seen = block_rounds.states_of(target(), [*prompt, *own.token_ids], (1, 2))

        def logits_of(text: list[int], window: int = WINDOW, seen: np.ndarray = seen) -> np.ndarray:
            config = {**CONFIG, "sliding_window": window}
            return expected(config, seen[: len(text) - 1], root=text[-1], depth=depth)

        assert np.abs(block_rounds.score_differences(own, prompt, logits_of, IDS)).max() < 2e-3
        for window in (WINDOW - 1, WINDOW + 1):
            others = block_rounds.score_differences(own, prompt, partial(logits_of, window=window), IDS)
            assert np.median(np.abs(others)) > 0.01


# ---- files


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, [WINDOW, None], [True, False]),
        ({"layer_types": ["full_attention"] * 2}, [None, None], [False, False]),
        ({"use_sliding_window": None}, [WINDOW, None], [True, False]),
        ({"dflash_config": {**CONFIG["dflash_config"], "causal": True}}, [WINDOW, None], [True, True]),
        ({"is_causal": True, "layer_types": None, "use_sliding_window": False}, [None, None], [True, True]),
        ({"layer_types": None, "max_window_layers": 1}, [None, WINDOW], [False, True]),
        ({"sliding_window_non_causal": True}, [WINDOW, None], [False, False]),
    ],
    ids=str,
)
def test_dflash_config_gives_windows_and_causality_of_each_layer(
    changes: dict[str, Any], windows: list[int | None], causal: list[bool]
) -> None:
    config = read_dflash({**CONFIG, **changes})
    assert [layer.attention.window for layer in config.layers] == windows
    assert [layer.attention.causal for layer in config.layers] == causal
    assert DFlashConfig.from_json(config.to_json()) == config


def test_info_of_a_head_with_windows_names_them(tmp_path: Path) -> None:
    text = info.describe(folders.write(tmp_path, CONFIG, tensors_of()))
    assert f"window: {WINDOW} tokens in 1 of 2 layers; none in 1 of 2 layers" in text
    assert "causal within a block in 1 of 2 layers" in text
