"""Test that heads which are written load unchanged: weights bit for bit, and the options of their config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.draft.dflash import DFlash
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.models.parts.rope import Rope
from jspec.train import write
from jspec.train.config import TrainConfig
from jspec.train.methods import METHODS, Eagle3Method
from tests.support import folders, tiny
from tests.train import support

pytestmark = pytest.mark.once

IDS = np.array([1, 5, 6, 30, 39], np.int32)


def written(folder: Path, head: EagleHead, config: TrainConfig | None = None) -> EagleHead:
    """Write a head of the small target and read it as a user does."""
    files = Eagle3Method(config or TrainConfig()).files(head, support.target(), {"bos_token_id": 1})
    write.write_head(folder, *files)
    return Eagle3.from_pretrained(folder, tree="chain:2").head


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eagle31": True},
        {"layers": 3},
        {"rope_theta": 5e5},
        {"feature_layers": (2, 3)},
        {"feature_layers": (1, 2, 3)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("drafted", [5, 40])
def test_written_heads_load_with_the_same_bits_and_options(
    tmp_path: Path, options: dict[str, Any], drafted: int
) -> None:
    config = TrainConfig(**{"feature_layers": support.STATES, **options})
    ids = IDS if drafted == 5 else np.arange(40, dtype=np.int32)
    head = Eagle3Method(config).create(support.target(), ids)
    found = written(tmp_path, head, config)
    own = head.replace(embed=None)
    assert jax.tree.structure(found.replace(config=own.config)) == jax.tree.structure(own)
    for (path, one), other in zip(jax.tree.leaves_with_path(own), jax.tree.leaves(found), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other), path
    assert found.config.resized(source_format="jspec") == head.config
    assert found.config.norm_output == found.config.fc_norm == config.eagle31


def test_written_eagle31_head_tells_its_norms_and_in_both_keys_that_the_normed_output_is_fed_back() -> None:
    method = Eagle3Method(TrainConfig(eagle31=True))
    fields, _ = method.files(support.head(eagle31=True), support.target(), {})
    assert fields["norm_output"] is fields["fc_norm"] is fields["eagle_config"]["return_hidden_post_norm"] is True


def test_default_states_are_written_as_the_authors_write_them(tmp_path: Path) -> None:
    target = tiny.model(40, layers=8)
    head = Eagle3Method(TrainConfig()).create(target, IDS)
    fields, tensors = Eagle3Method(TrainConfig()).files(head, target, {})
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), IDS)
    assert np.array_equal(tensors["d2t"] + np.arange(5), IDS)
    write.write_head(tmp_path, fields, tensors)
    assert Eagle3.from_pretrained(tmp_path, tree="chain:2").head.config.feature_layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("layers", "fused", "spread"),
    [
        (1, (0, 1, 2), (2,)),
        (2, (0, 1, 2), (1,)),
        (3, (0, 1, 3), (1, 2)),
        (4, (1, 2, 4), (2,)),
        (5, (1, 2, 5), (2, 3)),
        (6, (1, 3, 6), (2, 3, 4)),
        (7, (2, 3, 4), (2, 3, 4, 5)),
    ],
)
@pytest.mark.parametrize(("method", "drafter"), [("eagle3", Eagle3), ("dflash", DFlash), ("dspark", DSpark)])
def test_heads_for_targets_of_few_layers_read_states_that_exist_by_default(
    tmp_path: Path, method: str, drafter: Any, layers: int, fused: tuple[int, ...], spread: tuple[int, ...]
) -> None:
    target, options = tiny.model(40, layers=layers), TrainConfig(method=method)
    trained = METHODS[method](options)
    trained.check(target)
    files = trained.files(trained.create(target, IDS), target, {})
    write.write_head(tmp_path, *files)
    loaded = drafter.from_pretrained(tmp_path, tree="chain:2")
    assert loaded.feature_layers(target) == (fused if method == "eagle3" else spread)
    loaded.bind(target)


@pytest.mark.parametrize("width", [16, 20])
def test_a_head_of_the_authors_is_read_and_written_with_the_same_tensors(tmp_path: Path, width: int) -> None:
    """The target's hidden states are as wide as the head's, or wider."""
    config = {**folders.HEAD, "target_hidden_size": width}
    tensors = folders.head_tensors() | folders.random_tensors({"fc.weight": (16, 3 * width)})
    given = Eagle3.from_pretrained(folders.write(tmp_path / "given", config, tensors), tree="chain:2").head
    written(tmp_path / "own", given.replace(config=given.config.resized(feature_layers=(1, 2, 3))))
    folders.assert_same(folders.stored(tmp_path / "own"), tensors)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope": Rope(kind="linear", factor=2.0)}, "rope"),
        ({"qk_norm": "head"}, "qk_norm"),
        ({"feature_layers": (3, 2, 1)}, "feature_layers"),
    ],
)
def test_heads_that_the_format_cannot_describe_are_refused_by_name(changes: dict[str, Any], name: str) -> None:
    head = support.head()
    head = head.replace(config=head.config.resized(**changes))
    with pytest.raises(NotImplementedError, match=name):
        Eagle3Method(TrainConfig()).files(head, support.target(), {})


def test_bfloat16_weights_are_written_as_bfloat16(tmp_path: Path) -> None:
    target = support.target().replace(embed=support.target().embed.astype(jnp.bfloat16))
    head = support.head()
    write.write_head(tmp_path, *Eagle3Method(TrainConfig()).files(head, target, {}))
    assert folders.stored(tmp_path)["fc.weight"].dtype == folders.BFLOAT16
    assert json.loads((tmp_path / write.CONFIG).read_text())["torch_dtype"] == "bfloat16"
    loaded = Eagle3.from_pretrained(tmp_path, tree="chain:2", dtype="float32").head
    np.testing.assert_array_equal(loaded.fc, np.asarray(head.fc).astype(folders.BFLOAT16).astype(np.float32))
