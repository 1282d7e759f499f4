"""Compare DFlash heads with the formulas and with recordings of their authors' code, and test their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import DFlash, Model, Tree
from jspec.draft import auto
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.formats.dflash_format import read_dflash
from jspec.draft.head_config import DFlashConfig, Overrides
from jspec.models.weights.quantize import quantize_weights
from jspec.tools import info
from jspec.tools.replay import observe
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.reference import dflash as reference
from tests.support import byte_pair, folders, recordings, tiny
from tests.support.recordings import TOLERANCE, recording
from tests.support.views import prefilled

pytestmark = pytest.mark.once

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 6,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 1]},
    "num_target_layers": 3,
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "sliding_window": None,
}
TOKENS, ROOT = 9, 7  # number of committed tokens, and the token after them


def tensors_of(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """Return random tensors of a head as its authors save it; weights are scaled by their inputs."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        shapes |= folders.block_shapes(layer, config, hidden) | {f"{layer}.input_layernorm.weight": (hidden,)}
        shapes |= {f"{layer}.self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    drawn = folders.random_tensors(shapes)
    scaled = {n: t * 2 / np.sqrt(t.shape[-1]) if t.ndim == 2 else np.abs(t) + 0.5 for n, t in drawn.items()}
    return {name: tensor.astype(np.float32) for name, tensor in scaled.items()}


def target() -> Model:
    """Return a small random Qwen 3 with the vocabulary and the hidden size of `CONFIG`."""
    return tiny.model(40, layers=3, qk_norm="head")


def states() -> np.ndarray:
    """Return concatenated target states of the committed tokens."""
    return np.random.default_rng(7).normal(size=(TOKENS, 32)).astype(np.float32)


def computed(drafter: DFlash, model: Model, features: np.ndarray, root: int = ROOT) -> np.ndarray:
    """Compute a head's logits of the tokens after a root, with the context written by a prefill."""

    @jax.jit
    def run(*given: Any) -> Any:
        return reduce_partials(drafter.run_block(*given)[0].logits, jnp.float32)[0]

    return np.asarray(run(*prefilled(drafter, model, features, root=root)))


def expected(depth: int, **options: Any) -> np.ndarray:
    model, tensors = target(), options.pop("tensors", tensors_of())
    embed, output = np.asarray(model.embed), np.asarray(model.output_head, np.float64)
    features = options.pop("features", states())
    config = {**CONFIG, **options.pop("changes", {})}
    return reference.block_logits(config, tensors, embed, features, ROOT, depth, output=output, **options)


@pytest.mark.parametrize("depth", [1, 5])
def test_block_of_a_dflash_head_has_the_logits_of_the_formulas(tmp_path: Path, depth: int) -> None:
    """A block that sees only earlier tokens, or a context in another order, gives other logits."""
    drafter = DFlash.from_pretrained(folders.write(tmp_path, CONFIG, tensors_of()), tree=Tree.chain(depth))
    found, right = computed(drafter, target(), states()), expected(depth)
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    for control in (expected(depth, causal=True), expected(depth, features=states()[::-1])):
        assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


def test_dflash_head_with_biases_adds_them_to_queries_keys_and_values(tmp_path: Path) -> None:
    """The negative control has the biases of keys and values in each other's place."""
    rng, tensors = np.random.default_rng(3), tensors_of()
    for layer in range(2):
        for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 16)):
            tensors[f"layers.{layer}.self_attn.{name}_proj.bias"] = rng.normal(size=size).astype(np.float32)
    folder = folders.write(tmp_path, {**CONFIG, "attention_bias": True}, tensors)
    found = computed(DFlash.from_pretrained(folder, tree=Tree.chain(5)), target(), states())
    right = expected(5, tensors=tensors)
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    swapped = {
        n.replace("k_proj.b", "V.b").replace("v_proj.b", "k_proj.b").replace("V.b", "v_proj.b"): t
        for n, t in tensors.items()
    }
    assert np.abs(found - expected(5, tensors=swapped)).max() > 50 * TOLERANCE * np.abs(right).max()


def test_quantised_dflash_head_writes_the_context_of_its_quantised_weights(tmp_path: Path) -> None:
    """int8 weights differ from the original by 0.4 %, and the logits by a little more."""
    drafter = DFlash.from_pretrained(folders.write(tmp_path, CONFIG, tensors_of()), tree=Tree.chain(5))
    right = expected(5)
    found = computed(DFlash(quantize_weights(drafter.head, "int8"), Tree.chain(5)), target(), states())
    assert 1e-4 < np.abs(found - right).max() / np.abs(right).max() < 0.1


def test_dflash_head_with_a_draft_window_sees_its_block_and_the_newest_committed_tokens(tmp_path: Path) -> None:
    """A token sees the newest 8 tokens up to its own, and the later ones of its block; control: a token more."""
    folder, types = folders.write(tmp_path, CONFIG, tensors_of()), ["sliding_attention"] * 2
    drafter = DFlash.from_pretrained(folder, tree=Tree.chain(5)).with_window(8)
    windows = [{"layer_types": types, "sliding_window": size} for size in (8, 9)]
    found, (right, wider) = (
        computed(drafter, target(), states()),
        [expected(5, changes=w, causal=False) for w in windows],
    )
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    assert np.abs(found - wider).max() > 50 * TOLERANCE * np.abs(right).max()


# ---- recordings


def recorded_drafter(golden: Path) -> DFlash:
    return DFlash.from_pretrained(golden / "dflash/draft", tree=Tree.chain(7), dtype="float32")


def test_rounds_of_a_dflash_head_are_those_of_its_authors_code(golden: Path) -> None:
    recorded = recording(golden / "dflash/block8.npz")
    done = recordings.replay(recordings.engine_of(recorded_drafter(golden)), golden, recorded)
    assert recordings.same_rounds(done, recorded) > 0.95 * len(recorded["accept_len"])
    assert recorded["accept_len"].mean() > 0.5, "the recorded head is trained"


def test_block_logits_after_recorded_texts_are_those_of_the_authors_code(golden: Path) -> None:
    """The negative control lacks the newest token's features."""
    recorded, drafter = recording(golden / "dflash/block8.npz"), recorded_drafter(golden)
    model, size = tiny.load_target(byte_pair.TARGET), int(recorded["prefix_len"][0])
    root, features = int(recorded["tree_tokens"][0, 0]), recorded["features"][:size]
    found = computed(drafter, model, features, root)
    np.testing.assert_allclose(found, recorded["block_logits"][0], atol=TOLERANCE)
    other = computed(drafter, model, features[:-1], root)
    assert np.abs(other - recorded["block_logits"][0]).max() > 100 * TOLERANCE


def test_target_states_that_a_dflash_head_reads_are_those_of_its_authors_code(golden: Path) -> None:
    """The negative control reads the states one layer earlier."""
    recorded, drafter = recording(golden / "dflash/block8.npz"), recorded_drafter(golden)
    model, size = tiny.load_target(byte_pair.TARGET), int(recorded["prefix_len"][0])
    layers = drafter.feature_layers(model)
    assert layers == (2, 4, 6)
    prompt = np.array(tiny.recorded_prompts(golden)[0])[None]
    seen = observe(model, prompt, (*layers, 1, 3, 5)).states
    found, other = (np.concatenate([seen[state][0] for state in own], axis=-1) for own in (layers, (1, 3, 5)))
    np.testing.assert_allclose(found, recorded["features"][:size], atol=TOLERANCE)
    assert np.abs(other - recorded["features"][:size]).max() > 100 * TOLERANCE


# ---- files


def test_dflash_config_of_the_authors_has_states_one_above_the_layer_ids() -> None:
    config = read_dflash(CONFIG)
    assert (config.block_size, config.mask_token_id, config.feature_layers) == (6, 39, (1, 2))
    assert config.num_layers == 2 and config.qk_norm == "head" and config.source_format == "official"
    assert DFlashConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(("ids", "states"), [([3, 0], (4, 1)), ([2, 7], (3, 9))])
def test_dflash_layer_ids_are_outputs_of_layers_and_the_last_one_is_normed(
    ids: list[int], states: tuple[int, ...]
) -> None:
    changes = {"dflash_config": {"mask_token_id": 39, "target_layer_ids": ids}, "num_target_layers": 8}
    assert read_dflash({**CONFIG, **changes}).feature_layers == states


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("ids", [{}, {"target_layer_ids": None}, {"target_layer_ids": []}])
def test_head_of_blocks_without_layer_ids_is_read_with_feature_layers_alone(kind: str, ids: dict[str, Any]) -> None:
    """Published heads read other layers than any even spread, so that nothing can be taken for a missing list."""
    config = {**CONFIG, "dflash_config": {"mask_token_id": 39, **ids}, "num_target_layers": 64}
    with pytest.raises(CheckpointError, match=r"target_layer_ids: expected one list .* got none; pass feature_layers="):
        read_dflash(config, kind=kind)
    assert read_dflash(config, Overrides(feature_layers=(6, 20)), kind).feature_layers == (6, 20)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "Domino": ({"dflash_config": {"projector_type": "domino"}}, NotImplementedError, "projector_type.*domino"),
    "causal": ({"dflash_config": {"causal": 1}}, ValueError, "causal: expected true or false, got 1"),
    "unknown": ({"dflash_config": {"selector_rank": 8}}, NotImplementedError, "dflash_config: selector_rank"),
    "MLA": ({"dflash_config": {"attention_mode": "mla"}}, NotImplementedError, "attention_mode.*mla"),
    "layers": ({"model_type": "laguna"}, NotImplementedError, "model_type.*laguna"),
    "windows": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8},
        ValueError,
        "use_sliding_window: expected true, because layer_types has 'sliding_attention', got False",
    ),
    "narrow window": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 5, "mask_token_id": 3, "target_layer_ids": [0]}},
        ValueError,
        "sliding_window: expected at least 6, the block_size, .*, got 5",
    ),
    "no window": ({"dflash_config": {"use_swa": True}}, ValueError, "sliding_window: expected an integer, got None"),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, NotImplementedError, "attention_sink_bias.*True"),
    "block": ({"block_size": 1}, ValueError, "block_size: expected at least 2, got 1"),
    "no block": ({"block_size": None}, ValueError, "block_size: expected an integer"),
    "mask": (
        {"dflash_config": {"mask_token_id": 40, "target_layer_ids": [0]}},
        ValueError,
        "mask_token_id: expected an id below",
    ),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, ValueError, "mask_token_id: expected an integer"),
    "lists": ({"aux_hidden_state_layer_ids": [0, 2]}, ValueError, "target_layer_ids: expected one list"),
    "no list": (
        {"dflash_config": {"mask_token_id": 3}, "num_target_layers": None},
        ValueError,
        "target_layer_ids: expected one list .* got none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dflash_config_with_an_unsupported_or_wrong_value_raises_naming_it(name: str) -> None:
    changes, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        read_dflash({**CONFIG, **changes})


# ---- drafters


def test_dflash_drafter_refuses_trees_and_targets_that_do_not_fit() -> None:
    model = target()
    head = tiny.dflash_head(model, block_size=4, feature_layers=(1, 2))
    assert DFlash(head).tree == Tree.chain(3)
    with pytest.raises(ValueError, match=r"at most 3 deep, because the head's block_size is 4, got chain:4"):
        DFlash(head, "chain:4")
    with pytest.raises(ValueError, match=r"draft_window: .* got 3"):
        DFlash(head, draft_window=3)
    with pytest.raises(TypeError, match=r"expected DFlashHead, got 'path'; .* DFlash.from_pretrained\(path\)"):
        DFlash("path")  # type: ignore[arg-type]
    for other, message in (
        (tiny.model(41, layers=3), "vocabulary: the target needs 41, the head has 40"),
        (tiny.model(40, layers=3, hidden=32), "hidden size"),
    ):
        with pytest.raises(ValueError, match=message):
            DFlash(head).bind(other)
    with pytest.raises(ValueError, match=r"feature layers .* do not exist"):
        DFlash(tiny.dflash_head(model, block_size=4, feature_layers=(1, 9))).bind(model)
    with pytest.raises(ValueError, match="dtype: the target has bfloat16, the head has float32"):
        DFlash(head).bind(model.replace(embed=model.embed.astype("bfloat16")))


def test_info_of_a_dflash_head_names_block_features_and_fit(tmp_path: Path, golden: Path) -> None:
    text, fits = info.inspect_pair([golden / "dflash/draft"], byte_pair.TARGET)
    assert fits
    for part in ("DFlash head (official format)", "block: 8 tokens with the root, of which 7 draft", "states 2, 4, 6"):
        assert part in text
    other = folders.write(tmp_path, CONFIG, tensors_of())
    text, fits = info.inspect_pair([other], byte_pair.TARGET)
    assert not fits and "mismatch: vocabulary: the target needs 256, the head has 40" in text


def test_folder_of_a_dflash_head_is_recognised_as_a_drafter(golden: Path) -> None:
    drafter = auto.load_drafter(golden / "dflash/draft", dtype="float32", length=9)
    assert isinstance(drafter, DFlash) and drafter.tree == Tree.chain(7)
    assert isinstance(drafter.head, DFlashHead)
