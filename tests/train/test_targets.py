"""Test that heads are trained for targets of every family: latent attention, experts, windows, sinks, quantised."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle3
from jspec.models import families
from jspec.models.decoder import Model
from jspec.train.config import TrainConfig
from jspec.train.method import layer_sizes
from jspec.train.methods import METHODS
from jspec.train.observe import observe
from jspec.train.program import TrainingProgram
from jspec.train.rows import Rows
from tests.support import folders, tiny
from tests.support.arrays import on_device
from tests.support.recordings import recording

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "families"
FOLDERS = sorted(path.parent.relative_to(GOLDEN) for path in GOLDEN.rglob("config.json"))
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
DEFAULT = (Path("deepseek_v3"), Path("qwen3_next"))  # latent attention; states by slot; the others take as long each
WIDENED = tuple(Path("quantized") / name for name in ("deepseek_v3_fp8_block", "gpt_oss_mxfp4"))  # load no other way

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long, id=str(name)) for name in FOLDERS]
)
def test_updates_for_targets_of_each_family_lower_the_loss_of_a_head_that_loads(name: Path, tmp_path: Path) -> None:
    quantize = "none" if name in WIDENED else None
    target = Model.from_pretrained(GOLDEN / name, dtype="float32", quantize=quantize)
    states = tuple(sorted({0, target.config.num_layers // 2, target.config.num_layers}))
    method = METHODS["eagle3"](TrainConfig(ttt=2, feature_layers=states, learning_rate=1e-2, warmup=0.0))
    method.check(target)
    head = method.create(target, np.arange(16, dtype=np.int32))
    program = TrainingProgram(method, target, head, 10)
    state, tokens = program.start(head), np.random.default_rng(0).integers(0, 16, (2, 32))
    rows = Rows(on_device(tokens, jnp.int32), on_device(np.ones((2, 32), jnp.int32)), on_device(np.ones((2, 32), bool)))
    losses = []
    for _ in range(4):
        state, report = program.update(state, rows)
        assert bool(report.is_finite)
        losses.append(report.measured.figures().loss)
    assert losses[-1] < losses[0]
    fields, tensors = method.files(program.head(state), target, {})
    assert tensors["d2t"].shape == (16,)
    folders.write(tmp_path, fields, tensors)
    bound = Eagle3.from_pretrained(tmp_path, dtype="float32").bind(target)
    assert bound.config.draft_vocab_size == 16 and bound.config.states_of(target.config.num_layers) == states


@pytest.mark.parametrize(("types", "width"), [(["mlp", "moe"], 48), (["moe", "mlp"], 3 * 32)])
def test_new_head_is_as_wide_as_the_first_feed_forward_of_a_target_whose_first_layer_has_none(
    types: list[str], width: int
) -> None:
    """The file's dense layers have 48 channels; its hidden size is 32."""
    fields = json.loads((GOLDEN / "nemotron_h" / "config.json").read_text())
    config = families.read_config({**fields, "layers_block_type": ["linear_attention", "full_attention", *types]})
    assert layer_sizes(SimpleNamespace(config=config))["intermediate_size"] == width  # type: ignore[arg-type]


@pytest.mark.parametrize("family", HYBRID)
def test_documents_of_one_row_have_the_recorded_states_and_choices_of_each_alone(family: str) -> None:
    """The second document begins from a state of zeros, and its convolutions see no token of the first."""
    target, data = tiny.load_target(GOLDEN / family), recording(GOLDEN / family / "expect.npz")
    texts, row = [data["prompt1"], data["prompt0"]], np.zeros((3, 48), np.int32)
    places = [slice(0, len(texts[0])), slice(32, 32 + len(texts[1]))]
    for number, (part, text) in enumerate(zip(places, texts, strict=True), 1):
        row[0, part], row[1, part] = text, number
    rows = Rows(*(on_device(of[None]) for of in (row[0], row[1])), on_device(row[None, 1] > 0))
    layers = tuple(range(len(data["states"])))
    seen = jax.jit(observe, static_argnums=2)(target, rows, layers)
    for part, index in zip(places, (1, 0), strict=True):
        np.testing.assert_array_equal(seen.choices[0, part], np.argmax(data[f"logits{index}"], axis=-1))
    states = np.stack(np.split(np.asarray(seen.features)[0, places[1]], len(layers), axis=-1))
    np.testing.assert_allclose(states, data["states"], atol=2e-4)
