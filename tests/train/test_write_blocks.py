"""Test that DFlash, DSpark and Medusa heads which are written load unchanged, and go on as initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec.draft.dflash import DFlash
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle3
from jspec.draft.medusa import Medusa
from jspec.train import write
from jspec.train.config import TrainConfig
from jspec.train.methods import METHODS
from tests.support import tiny
from tests.train import support

pytestmark = pytest.mark.once

READERS: dict[str, Any] = {"eagle3": Eagle3, "dflash": DFlash, "dspark": DSpark, "medusa": Medusa}
OPTIONS: dict[str, Any] = dict(ttt=3, feature_layers=(1, 3), layers=2, markov_rank=4)


def assert_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other), path


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_written_block_heads_load_with_the_same_bits_and_options(tmp_path: Path, method: str) -> None:
    made = METHODS[method](TrainConfig(method=method, **OPTIONS))
    head = made.create(support.target(), np.arange(40))
    write.write_head(tmp_path, *made.files(head, support.target(), {"eos_token_id": 2}))
    found = READERS[method].from_pretrained(tmp_path, tree="chain:3", dtype="float32").head
    assert found.config.resized(source_format="jspec") == head.config
    assert_equal(found.replace(config=head.config), head)
    assert (found.config.max_depth, found.config.mask_token_id) == (3, 39)
    assert_equal(made.load(tmp_path, support.target()).replace(config=head.config), head)
    other = METHODS[method](TrainConfig(method=method, **{**OPTIONS, "ttt": 2}))
    with pytest.raises(ValueError, match="ttt: expected 3, which the head of init drafts, got 2"):
        other.load(tmp_path, support.target())


@pytest.mark.parametrize("state", [0, 2])
def test_states_that_the_format_of_dflash_cannot_name_are_refused(state: int) -> None:
    made = METHODS["dflash"](TrainConfig(method="dflash", **{**OPTIONS, "feature_layers": (state, 3)}))
    head = made.create(support.target(), np.arange(40))
    with pytest.raises(NotImplementedError, match="feature_layers"):
        made.files(head, support.target(), {})


def test_written_medusa_heads_load_with_the_same_bits(tmp_path: Path) -> None:
    made = METHODS["medusa"](TrainConfig(method="medusa", ttt=3, layers=2))
    heads = made.create(support.target(), np.arange(40))
    rng = np.random.default_rng(0)
    heads = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), heads)
    write.write_head(tmp_path, *made.files(heads, support.target(), {}), made.weights_file)
    found = Medusa.from_pretrained(tmp_path, tree="chain:3").heads
    assert_equal(found.replace(config=heads.config), heads)
    assert_equal(made.load(tmp_path, support.target()).replace(config=heads.config), heads)
    with pytest.raises(ValueError, match="ttt: expected 3, which the head of init drafts, got 2"):
        METHODS["medusa"](TrainConfig(method="medusa", ttt=2)).load(tmp_path, support.target())


def test_new_medusa_heads_predict_what_the_target_predicts() -> None:
    made = METHODS["medusa"](TrainConfig(method="medusa", ttt=2))
    heads = made.create(support.target(), np.arange(40))
    assert np.array_equal(heads.heads[1].output, support.target().output_head)
    assert not np.any(heads.heads[1].blocks[0].weight)


def test_an_eagle_head_to_go_on_with_has_its_own_bits_and_must_fit_the_target(tmp_path: Path) -> None:
    made = METHODS["eagle3"](TrainConfig())
    head = support.head(eagle31=True)
    write.write_head(tmp_path, *made.files(head, support.target(), {}))
    loaded = made.load(tmp_path, support.target())
    assert_equal(loaded.replace(config=head.config), head)
    with pytest.raises(ValueError, match="vocabulary: the target needs 41, the head has 40"):
        made.load(tmp_path, tiny.model(41, layers=2, hidden=16))
