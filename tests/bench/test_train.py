"""`jspec bench train`: the figures follow from the time, the shapes and the compiled program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.__main__ import main
from jspec.models.decoder import Model
from jspec.models.params import abstract_weights, model_params
from jspec.tools.bench import random_models, train
from jspec.train import plan
from jspec.train.config import TrainConfig
from jspec.train.methods import Eagle3Method

pytestmark = pytest.mark.once


def test_train_command_reports_speed_arithmetic_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "train.json"
    sizes = ("--shape", "least", "--length", "32", "--batch", "2", "--ttt", "1", "--seconds", "0.01")
    assert main(["bench", "train", *sizes, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["results"]
    assert found["tokens"] == 64 and found["updates"] >= 1
    assert found["tokens_per_second"] == pytest.approx(64 / found["seconds"])
    assert found["rate"] == pytest.approx(found["flops"] * found["tokens_per_second"])
    assert found["planned"] == sum(found["plan"].values()) and found["compiled"] > found["plan"]["target"]
    assert found["share"] is None and 0 < found["loss"] < 10
    out = capsys.readouterr().out
    assert "tokens/s" in out and "weights and moments" in out
    assert "peak_so_far" in found  # the device reports one figure for all cases so far


def test_plan_of_an_8b_target_has_the_sizes_and_the_arithmetic_of_its_shapes() -> None:
    config = TrainConfig(draft_vocab=32000)
    shape = random_models.TARGETS["llama3-8b"]
    target = Model.from_weights(shape, abstract_weights(model_params(shape), "bfloat16"))
    head = jax.eval_shape(lambda t: Eagle3Method(config).create(t, np.arange(32000)), target)
    layer = 6144 * 8192 + 4096 * 4096 + 3 * 14336 * 4096  # qkv, o, gate, up and down
    trained = layer + 3 * 4096 * 4096 + 32000 * 4096 + 4 * 4096  # fc, output head and four norms
    planned = plan.memory_plan(config, target, head)
    assert planned["weights and moments"] == 12 * trained and planned["gradient"] == 4 * trained
    assert planned["target"] == pytest.approx(16.06e9, rel=1e-3)
    assert planned["probabilities of the target"] == 2 * 16384 * 32000
    assert 30e9 < sum(planned.values()) < 60e9
    products, logits, scores, fused = 2 * layer, 2 * 32000 * 4096, 4 * 4096 * 1024, 2 * 3 * 4096 * 4096
    step = 4 * products + 4 * logits + 3.5 * scores
    assert plan.head_flops(config, head) == 7 * step + 3 * fused
    keeps = replace(config, keep_activations=True)
    assert plan.head_flops(keeps, head) == 7 * (step - products) + 3 * fused
    more = plan.memory_plan(keeps, target, head)["activations"] - planned["activations"]
    assert more == 6 * planned["activations"] > 6e9
    flops = train._flops(config, target, head)
    assert 36e9 < flops < 41e9
    assert train._flops(TrainConfig(draft_vocab=32000, ttt=3), target, head) < flops - 10e9


def test_random_batches_have_several_documents_of_whole_blocks() -> None:
    rows = next(train._batches(TrainConfig(length=256, batch=2), 100))
    assert rows.tokens.shape == (2, 256) and int(jnp.max(rows.tokens)) < 100
    first = np.flatnonzero(np.diff(np.asarray(rows.segments)[0])) + 1
    assert first.tolist() == [64, 128, 192]
