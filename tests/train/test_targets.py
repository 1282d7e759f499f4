"""Test that heads are trained for targets of every family: latent attention, experts, windows, sinks, quantised."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.decoder import Model
from jspec.train.config import TrainConfig
from jspec.train.methods import METHODS
from jspec.train.program import TrainingProgram
from jspec.train.rows import Rows
from tests.support.arrays import on_device

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "families"
FOLDERS = sorted(path.parent.relative_to(GOLDEN) for path in GOLDEN.rglob("config.json"))
DEFAULT = (Path("deepseek_v3"),)  # latent attention and experts; the others take as long each
WIDENED = tuple(Path("quantized") / name for name in ("deepseek_v3_fp8_block", "gpt_oss_mxfp4"))  # load no other way

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long, id=str(name)) for name in FOLDERS]
)
def test_updates_for_targets_of_each_family_lower_the_loss(name: Path) -> None:
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
    assert method.files(program.head(state), target, {})[1]["d2t"].shape == (16,)
