"""Compare the layers of Nemotron-H that predict further tokens with the layers of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert.fields import CheckpointError, Fields
from jspec import MTP, Engine, SamplingParams, Tree
from jspec.draft.choice import choose_drafter
from jspec.draft.eagle_head import EagleHead
from jspec.draft.formats.mtp_format import PARTS
from jspec.draft.suffix import Suffix
from jspec.models.families.nemotron import types_of
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
    folders.write(folder, {**config, **ONE, "num_hidden_layers": 5}, tensors)  # a number, as published files have
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
    weights = {name.replace("mtp.layers.", "model.layers."): torch.tensor(of) for name, of in tensors.items()}
    experts = "model.layers.1.mixer.experts."
    for part in ("up_proj", "down_proj"):
        each = [weights.pop(f"{experts}{index}.{part}.weight") for index in range(config["n_routed_experts"])]
        weights[f"{experts}{part}"] = torch.stack(each)
    weights["model.norm_f.weight"] = weights.pop("model.layers.1.final_layernorm.weight")
    state = made.state_dict()
    state |= {name: weights[name] for name in state if name in weights}
    assert set(state) - set(weights) == {"model.embeddings.weight"}  # the model reads joined inputs instead
    made.load_state_dict(state)
    return made.eval()


def reference(
    config: Mapping[str, Any], tensors: Tensors, tokens: list[int], features: np.ndarray, *, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of pairs of a token and the feature before it, and the states after the last norm."""
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
    differing = score_errors(drafter.bind(target), states, done[1], prompts[1])
    assert len(differing) >= 12 and max(differing) < 1e-3


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


PATTERN = "mtp_hybrid_override_pattern"


@pytest.mark.parametrize(
    ("types", "pattern"),
    [
        (None, None),
        (None, "*E"),
        (["full_attention", "moe"], "*E"),
        (["attention", "moe"], "EM"),  # the default list is none
        (["moe", "mlp"], "E-"),
    ],
)
def test_types_of_the_layers_are_those_of_transformers(types: list[str] | None, pattern: str | None) -> None:
    transformers = pytest.importorskip("transformers", reason="the types are compared with transformers")
    keys = {"mtp_layers_block_type": types} | ({} if pattern is None else {PATTERN: pattern})
    theirs = transformers.NemotronHConfig(**keys).mtp_layers_block_type
    assert types_of(Fields(keys), "mtp_layers_block_type", PATTERN, PARTS) == theirs


def test_list_of_the_layers_beside_another_pattern_is_refused_which_transformers_ignores() -> None:
    with pytest.raises(CheckpointError, match=rf"{PATTERN}: expected the types of mtp_layers_block_type.*, got '\*E'"):
        types_of(Fields({"mtp_layers_block_type": ["moe"], PATTERN: "*E"}), "mtp_layers_block_type", PATTERN, PARTS)


WITHOUT_COUNT: dict[str, Any] = {"num_nextn_predict_layers": None}


@pytest.mark.parametrize(
    ("changes", "left_out", "words"),
    [
        ({}, "none", None),
        (WITHOUT_COUNT, "none", None),  # the tensors are counted
        ({"layers_block_type": None, "hybrid_override_pattern": "MEM*E"}, "none", None),
        ({"layers_block_type": None, "layer_types": ["mamba", "moe", "mamba", "attention", "moe"]}, "none", None),
        ({PATTERN: "*EM"}, "none", r"mtp_layers_block_type: expected .*got .*linear_attention"),
        (WITHOUT_COUNT, "mtp.layers.1.", r"missing: .*mtp\.layers\.1\."),
        ({}, "mtp.", ""),
    ],
    ids=str,
)
def test_drafter_auto_is_the_layer_if_it_can_be_read_and_else_the_log_says_why_not(
    changes: dict[str, Any], left_out: str, words: str | None, model: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = json.loads((model / "config.json").read_text())
    tensors = {name: of for name, of in load_file(model / "model.safetensors").items() if not name.startswith(left_out)}
    folders.write(tmp_path, {**config, **changes}, tensors)
    choice = choose_drafter(tmp_path)
    assert choice.method == ("mtp" if words is None else "suffix")
    assert isinstance(choice.load(dtype="float32"), MTP if words is None else Suffix)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(words)
    if words:
        assert re.search(f"cannot draft: .*{words}", warnings[0])
        with pytest.raises((ValueError, NotImplementedError), match=words):
            MTP.from_pretrained(tmp_path)
