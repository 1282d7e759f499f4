"""Compare drafting with a model's own MTP layer with recordings of transformers, and with the layer without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import MTP, Completion, Eagle, Engine, Model, SamplingParams, Tree
from jspec.core.numerics import REFERENCE
from jspec.core.records import TokenBatch
from jspec.draft.eagle_head import FIRST_ROW, EagleHead, output_logits, project_inputs, run_on_cache
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.quantize import quantized_as
from jspec.tools.convert import main
from jspec.tools.testing import last_logits
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Quantized
from tests.support import block_rounds, folders, tiny
from tests.support.arrays import on_device
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FAMILIES = ("deepseek_v3", "glm4_moe")
FOLDERS = Path(__file__).parents[1] / "data" / "golden" / "families"
TOLERANCE = 1e-4  # both sides use float32 but add up in different orders
LONGEST = 100  # tokens of a text in these tests
LEAST = 1e-3  # a wrong reading moves some logit by more
CHAIN, DYNAMIC = Tree.chain(3), Tree.topk(8, 3, 3)


@cache
def pair(family: str) -> tuple[Model, EagleHead]:
    """Return a recorded model and its MTP layer with the model's embedding and output head."""
    target = tiny.load_target(FOLDERS / family)
    return target, MTP.from_pretrained(FOLDERS / family, dtype="float32").bind(target)


@jax.jit
def run_padded(head: EagleHead, tokens: Any, features: Any) -> tuple[Any, Any]:
    pairs = TokenBatch(
        tokens=tokens[None],
        positions=on_device(np.arange(LONGEST))[None],
        valid=on_device(np.ones((1, LONGEST), bool)),
        first_row=on_device(np.full(1, FIRST_ROW)),
        page_table=on_device(np.arange(2))[None],
        bits=None,
        numerics=REFERENCE,
    )
    shape = PoolShape(1, 2, LONGEST, LONGEST, "float32", "float32")
    caches = create(head.config.layers, shape, "float32")
    inputs = project_inputs(head, pairs.tokens, features[None], pairs.numerics)
    attended, residual, _ = run_on_cache(head, caches, pairs, *inputs, attends=True)
    out, product = output_logits(head, attended, residual, REFERENCE)
    return reduce_partials(product, jnp.float32)[0], out.hidden[0]


def run(head: EagleHead, tokens: Any, features: Any) -> tuple[np.ndarray, np.ndarray]:
    """Run the layer on pairs of a token and the feature before it, in one pass; return its logits and features."""
    count = len(tokens)
    padding = LONGEST - count
    padded = np.pad(np.asarray(tokens, np.int32), (0, padding)), np.pad(features, ((0, padding), (0, 0)))
    logits, hidden = run_padded(head, padded[0], padded[1].astype(np.float32))
    return np.asarray(logits)[:count], np.asarray(hidden)[:count]


def drafted(head: EagleHead, tokens: list[int], features: np.ndarray, path: list[int]) -> np.ndarray:
    """Return the logits after a text and after each token of a drafted path; the layer reads its own outputs.

    Args:
        head: the layer.
        tokens: tokens of the text without the first one.
        features: the model's state before each of them.
        path: the drafted tokens.
    """
    logits, hidden = run(head, tokens, features)
    found = [logits[-1]]
    for token in path:
        tokens, features = [*tokens, token], np.concatenate([features, hidden[-1:]])
        logits, hidden = run(head, tokens, features)
        found.append(logits[-1])
    return np.stack(found)


def recorded_error(head: EagleHead, family: str) -> tuple[float, float]:
    """Return the largest differences from the recorded logits of the layer, and of the layer used again, twice."""
    data = recording(FOLDERS / family / "expect.npz")
    tokens, features = data["mtp_tokens"].tolist(), data["mtp_hidden"]
    first = np.abs(run(head, tokens, features)[0] - data["mtp_logits"]).max()
    again = drafted(head, tokens, features, data["mtp_drafts"][:2].tolist())[1:]
    return float(first), float(np.abs(again - data["mtp_more_logits"]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_used_once_and_again_has_the_logits_of_transformers(family: str) -> None:
    assert max(recorded_error(pair(family)[1], family)) < TOLERANCE


def halves_swapped(head: EagleHead) -> EagleHead:
    assert head.fc is not None
    return head.replace(fc=jnp.roll(head.fc, head.config.hidden_size, axis=1))


WRONG: dict[str, Callable[[EagleHead], EagleHead]] = {
    "feature first": halves_swapped,
    "embedding not normed": lambda head: head.replace(embed_norm=jnp.ones_like(head.embed_norm)),
    "feature not normed": lambda head: head.replace(feature_norm=jnp.ones_like(head.feature_norm)),
    "norms swapped": lambda head: head.replace(embed_norm=head.feature_norm, feature_norm=head.embed_norm),
    "no norm before the output head": lambda head: head.replace(norm=jnp.ones_like(head.norm)),
}


@pytest.mark.parametrize("name", WRONG)
def test_layer_with_a_wrong_reading_differs_from_transformers(name: str) -> None:
    assert recorded_error(WRONG[name](pair("glm4_moe")[1]), "glm4_moe")[0] > LEAST


def test_layer_that_reads_its_output_before_the_norm_differs_in_the_second_token_alone() -> None:
    _, head = pair("glm4_moe")
    raw = head.replace(config=replace(head.config, norm_output=False))
    first, again = recorded_error(raw, "glm4_moe")
    assert first < TOLERANCE and again > LEAST
    loaded = MTP.from_pretrained(FOLDERS / "glm4_moe", dtype="float32", norm_output=False)
    assert loaded.head.config == raw.config


# ---- in an engine


def completions(family: str, tree: Tree, page_size: int, **options: Any) -> tuple[list[Completion], list[list[int]]]:
    """Decode the recorded prompts twice; the second time, their pages are in the prefix cache."""
    target, _ = pair(family)
    data = recording(FOLDERS / family / "expect.npz")
    prompts = [data[f"prompt{i}"].tolist() for i in range(3)]
    own: dict[str, Any] = dict(slots=3, max_len=160, page_size=page_size, buckets=(3,), prefill_buckets=(48,))
    drafter = MTP.from_pretrained(FOLDERS / family, tree=tree, dtype="float32")
    with Engine(target, drafter=drafter, controls=False, **own, **options) as engine:
        params = SamplingParams(max_tokens=64, temperature=0)
        for _ in range(2):
            done = engine.generate(prompts, params, trace=True)
            assert [one.token_ids for one in done] == [data[f"greedy{i}"].tolist() for i in range(3)]
    assert done[2].metrics.num_cached_tokens >= 64
    return done, prompts


CASES = [
    ("deepseek_v3", CHAIN, 16),
    pytest.param("deepseek_v3", DYNAMIC, 1, marks=pytest.mark.long),
    pytest.param("glm4_moe", DYNAMIC, 16, marks=pytest.mark.long),
    pytest.param("glm4_moe", CHAIN, 1, marks=pytest.mark.long),
    ("glm4_moe", DYNAMIC, 1),
]


def score_errors(
    head: EagleHead, states: np.ndarray, own: Completion, prompt: list[int], rounds: int = 6
) -> list[float]:
    """Return the differences of the last rounds' scores from those of the layer run without a cache."""
    found = []
    for one, text in list(block_rounds.texts(own, prompt))[-rounds:]:
        for node in range(1, len(one.tokens)):
            path, at = [], node
            while at > 0:
                path, at = [int(one.tokens[at]), *path], int(one.parents[at])
            logits = drafted(head, text[1:], states[: len(text) - 1], path[:-1]).astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            found.append(abs(one.scores[node] - sum(log_probs[range(len(path)), path])))
    return found


@pytest.mark.parametrize(("family", "tree", "page_size"), CASES, ids=str)
def test_engine_with_the_layer_emits_greedy_tokens_and_drafts_as_the_layer_without_a_cache(
    family: str, tree: Tree, page_size: int
) -> None:
    done, prompts = completions(family, tree, page_size)
    data, (target, head) = recording(FOLDERS / family / "expect.npz"), pair(family)
    if tree.is_chain and done[1].rounds:
        assert done[1].rounds[0].tokens[1:].tolist() == data["mtp_drafts"].tolist()
    states = block_rounds.states_of(target, [*prompts[1], *done[1].token_ids], (target.config.num_layers + 1,))
    errors = score_errors(head, states, done[1], prompts[1])
    assert len(errors) >= 12 and max(errors) < 1e-3
    moved = score_errors(head, np.roll(states, 1, axis=0), done[1], prompts[1], rounds=1)
    assert max(moved) > 0.01, "control: states of other tokens"


def test_engine_on_two_devices_with_the_layer_emits_the_greedy_tokens_of_transformers() -> None:
    completions("deepseek_v3", CHAIN, 16, tensor_parallel=2)


def test_quantised_layer_drafts_for_a_target_that_is_not() -> None:
    own = MTP.from_pretrained(FOLDERS / "deepseek_v3", dtype="float32", quantize="int8", tree="chain:2")
    assert isinstance(own.head.fc, Quantized) and isinstance(own.head.layers[0].experts_down, Quantized)
    target, _ = pair("deepseek_v3")
    data = recording(FOLDERS / "deepseek_v3" / "expect.npz")
    with Engine(target, drafter=own, slots=1, max_len=64, buckets=(1,), prefill_buckets=(16,)) as engine:
        (done,) = engine.generate(data["prompt0"].tolist(), SamplingParams(max_tokens=16, temperature=0))
    assert done.token_ids == data["greedy0"].tolist()[:16]


def test_layer_of_a_quantised_file_that_is_not_quantised_is_read(golden: Path, tmp_path: Path) -> None:
    """Exporters leave the layer as it is; the rest of the file is quantised."""
    folder = golden / "families" / "glm4_moe"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    scheme = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["model.layers.2"]}
    folders.write(tmp_path, config | {"quantization_config": scheme}, tensors)
    own, other = (MTP.from_pretrained(place, dtype="float32").head for place in (folder, tmp_path))
    assert quantized_as(other) is None
    np.testing.assert_array_equal(own.fc, other.fc)
    with pytest.raises(ValueError, match="expected float8 weights"):  # a model of this file has none
        Model.from_pretrained(tmp_path)


# ---- files


def test_folder_without_the_layer_is_refused_by_name(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match=r"model_type: expected 'deepseek_v3' or .* for MTP layers, got 'llama'"
    ):
        MTP.from_pretrained(golden / "families" / "llama")
    folder = golden / "families" / "glm4_moe"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    folders.write(tmp_path / "none", config | {"num_nextn_predict_layers": 0}, kept)
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers: expected at least 1.*got 0"):
        MTP.from_pretrained(tmp_path / "none")
    folders.write(tmp_path / "dropped", config, kept)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\."):
        MTP.from_pretrained(tmp_path / "dropped")
    assert main([str(folder), str(tmp_path / "converted")]) == 0
    with pytest.raises(ValueError, match="expected the Hugging Face folder of a model"):
        MTP.from_pretrained(tmp_path / "converted")


@pytest.mark.parametrize("count", [0, None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_target_is_loaded_without_the_layer_whatever_its_config_counts(
    family: str, count: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exporters of quantised models write the count 0 and keep the tensors."""
    folder = FOLDERS / family
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = {**config, "num_nextn_predict_layers": count}
    beside = {"mtp.fc.weight": np.zeros((2, 2), np.float32)}
    folders.write(tmp_path, config, tensors | (beside if count == 0 else {}))
    with caplog.at_level("INFO"):
        model = Model.from_pretrained(tmp_path, dtype="float32")
    (note,) = [record for record in caplog.records if "predict further tokens are left out" in record.message]
    assert note.levelname == ("INFO" if count else "WARNING")
    data = recording(folder / "expect.npz")
    np.testing.assert_allclose(last_logits(model, data["prompt0"].tolist()), data["logits0"][-1], atol=TOLERANCE)
    read, counted = (MTP.from_pretrained(path, dtype="float32").head for path in (tmp_path, folder))
    np.testing.assert_array_equal(read.fc, counted.fc)


def test_layer_alone_is_refused_as_a_target(tmp_path: Path) -> None:
    """Some exporters write the layer to a folder of its own, as layer 0."""
    folder = FOLDERS / "glm4_moe"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    first, last = f"model.layers.{config['num_hidden_layers']}.", "model.layers.0."
    alone = {name.replace(first, last): tensor for name, tensor in tensors.items() if name.startswith(first)}
    folders.write(tmp_path, {**config, "num_hidden_layers": 1}, alone)
    with pytest.raises(NotImplementedError, match=r"got multi-token prediction \(MTP\) layers; this method"):
        Model.from_pretrained(tmp_path)


def test_layer_is_read_without_the_copies_of_embedding_and_head(golden: Path, tmp_path: Path) -> None:
    """Other values in the copies change nothing; of two layers the first drafts."""
    folder = golden / "families" / "glm4_moe"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    second = {n.replace("layers.2.", "layers.3."): 0 * t for n, t in tensors.items() if n.startswith("model.layers.2.")}
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del tensors[f"model.layers.2.{name}"]
    folders.write(tmp_path, config | {"num_nextn_predict_layers": 2}, tensors | second)
    own, other = (MTP.from_pretrained(place, dtype="float32").head for place in (folder, tmp_path))
    assert own.config == other.config and own.embed is None and own.head is None
    np.testing.assert_array_equal(own.fc, other.fc)
    np.testing.assert_array_equal(own.layers[0].qkv, other.layers[0].qkv)


def test_layer_of_another_method_or_target_is_refused() -> None:
    target, _ = pair("glm4_moe")
    head = MTP.from_pretrained(FOLDERS / "glm4_moe", dtype="float32").head
    with pytest.raises(ValueError, match="Eagle: expected a head of method 'eagle', got 'mtp'"):
        Eagle(head)
    with pytest.raises(ValueError, match="MTP: vocabulary: the target needs 96, the head has 128"):
        MTP(head).bind(pair("deepseek_v3")[0])
    assert MTP(head).feature_layers(target) == (target.config.num_layers + 1,)
