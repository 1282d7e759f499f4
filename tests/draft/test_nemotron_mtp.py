"""Compare the layers of Nemotron-H that predict further tokens with the layers of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import MTP, Engine, SamplingParams, Tree
from jspec.draft.eagle_head import EagleHead
from tests.draft.test_hybrid_mtp import LEAST, TOLERANCE, Tensors, bound, errors
from tests.draft.test_mtp import halves_swapped, score_errors
from tests.models.test_hybrid_files import FOLDERS, recorded
from tests.support import block_rounds, folders, tiny
from tests.support.recordings import recording

pytestmark = pytest.mark.once

ONE = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}


@cache
def written(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write the recorded model with random layers of attention and of experts, and return its config and tensors."""
    config, tensors = recorded("nemotron_h")
    rng, hidden = np.random.default_rng(5), config["hidden_size"]
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    of_parts = {
        name.replace(f"backbone.layers.{source}.", f"mtp.layers.{part}."): shape
        for part, source in enumerate((3, 4))
        for name, shape in shapes.items()
        if name.startswith(f"backbone.layers.{source}.")
    }
    of_parts |= {f"mtp.layers.{name}.weight": (hidden,) for name in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    of_parts["mtp.layers.0.eh_proj.weight"] = hidden, 2 * hidden
    for name, shape in of_parts.items():
        drawn = rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 1.5 / shape[1] ** 0.5)
        tensors[name] = (drawn + (len(shape) == 1 and "norm" in name)).astype(np.float32)
    folders.write(folder, {**config, **ONE}, tensors)
    return config, tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron_h")
    written(folder)
    return folder


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


@cache
def theirs(folder: Path) -> Any:
    """Return a model of transformers whose layers and last norm are those that predict further tokens."""
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config, tensors = written(folder)
    changes = {"layers_block_type": ONE["mtp_layers_block_type"], "time_step_limit": (0.0, float("inf"))}
    made = NemotronHForCausalLM(NemotronHConfig(**{**config, **changes}))
    given = {name.replace("mtp.layers.", "model.layers."): torch.tensor(of) for name, of in tensors.items()}
    experts = "model.layers.1.mixer.experts."
    for part in ("up_proj", "down_proj"):
        each = [given.pop(f"{experts}{index}.{part}.weight") for index in range(config["n_routed_experts"])]
        given[f"{experts}{part}"] = torch.stack(each)
    given["model.norm_f.weight"] = given.pop("model.layers.1.final_layernorm.weight")
    state = made.state_dict()
    state |= {name: given[name] for name in state if name in given}
    assert set(state) - set(given) == {"model.embeddings.weight"}  # the model reads joined inputs instead
    made.load_state_dict(state)
    return made.eval()


def reference(
    config: Mapping[str, Any], tensors: Tensors, tokens: list[int], features: np.ndarray, *, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of pairs of a token and the feature before it, and the states behind the last norm."""
    import torch

    def weight(name: str) -> np.ndarray:
        return tensors[f"{name}.weight"].astype(np.float64)

    embedded = norm(weight("backbone.embeddings")[tokens], weight("mtp.layers.0.enorm"))
    both = np.concatenate([embedded, norm(features, weight("mtp.layers.0.hnorm"))], axis=-1)
    joined = torch.tensor((both @ weight("mtp.layers.0.eh_proj").T).astype(np.float32))[None]
    with torch.no_grad():
        out = theirs(folder).model(inputs_embeds=joined, use_cache=False).last_hidden_state[0].numpy()
    return out @ weight("lm_head").T, out


def differences(head: EagleHead, folder: Path) -> tuple[float, float]:
    def compute(*inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        return reference(*inputs, folder=folder)

    return errors(head, *written(folder), compute)


def test_layers_used_once_and_again_have_the_logits_of_transformers(model: Path) -> None:
    theirs(model)
    assert max(differences(bound(model), model)) < TOLERANCE


WRONG: dict[str, Callable[[EagleHead], EagleHead]] = {
    "feature first": halves_swapped,
    "norms swapped": lambda head: head.replace(embed_norm=head.feature_norm, feature_norm=head.embed_norm),
    "last norm without its weight": lambda head: head.replace(norm=jnp.ones_like(head.norm)),
    "norms of attention and experts swapped": lambda head: head.replace(
        layers=[head.layers[0].replace(input_norm=head.layers[0].mlp_norm, mlp_norm=head.layers[0].input_norm)]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_layers_with_a_wrong_reading_differ_from_transformers(name: str, model: Path) -> None:
    theirs(model)
    assert differences(WRONG[name](bound(model)), model)[0] > LEAST


def test_layers_that_read_their_output_before_the_norm_differ_when_they_are_used_again(model: Path) -> None:
    theirs(model)
    first, again = differences(bound(model, norm_output=False), model)
    assert first < TOLERANCE and again > LEAST


def test_engine_with_the_layers_emits_the_recorded_tokens_and_drafts_as_the_layers_without_a_cache(model: Path) -> None:
    target, data = tiny.load_target(model), recording(FOLDERS / "nemotron_h" / "expect.npz")
    prompts = [data[f"prompt{i}"].tolist() for i in range(3)]
    drafter = MTP.from_pretrained(model, tree=Tree.topk(8, 3, 3), dtype="float32")
    options: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(48,), prefix_cache=False)
    with Engine(target, drafter=drafter, controls=False, **options) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=48, temperature=0), trace=True)
    assert [each.token_ids for each in done] == [data[f"greedy{i}"].tolist()[:48] for i in range(3)]
    states = block_rounds.states_of(target, [*prompts[1], *done[1].token_ids], (target.config.num_layers + 1,))
    found = score_errors(drafter.bind(target), states, done[1], prompts[1])
    assert len(found) >= 12 and max(found) < 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "num_nextn_predict_layers: expected at least 1"),
        (ONE, r"missing: .*mtp\.layers\.0\.eh_proj\.weight"),
        (ONE | {"mtp_layers_block_type": ["full_attention", "mlp"]}, "mtp_layers_block_type: expected .*'moe'"),
        (
            ONE | {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "ME"},
            "mtp_layers_block_type: expected .*got .*linear_attention",
        ),
    ],
    ids=str,
)
def test_folder_without_the_layers_or_with_others_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, tensors = recorded("nemotron_h")
    folders.write(tmp_path, {**config, **changes}, tensors)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        MTP.from_pretrained(tmp_path)
