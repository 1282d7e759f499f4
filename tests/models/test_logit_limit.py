"""Count the launches of an output head whose logits have a limit or a divisor, compiled for an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.core.numerics import Numerics
from jspec.models.decoder import Model
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.support import tiny
from tests.support.h200 import compile_for_h200

GEMMA, GRANITE = {"logit_softcap": 30.0}, {"logit_divisor": 8.0}


def launches(batch: int, deterministic: bool, options: dict[str, float]) -> list[str]:
    """Return the names of the launches of an output head of Gemma 2's size (2B), without their numbers."""
    small, bf16 = tiny.model(40), jnp.dtype("bfloat16")
    embed = jax.ShapeDtypeStruct((256000, 2304), bf16)

    def logits(x: jax.Array, embed: jax.Array) -> Any:
        model = Model(embed, [], small.norm, None, replace(small.config, **options))  # type: ignore[arg-type]
        return reduce_partials(model.logit_sums(x, Numerics(deterministic=deterministic)), jnp.dtype("float32"))

    program = compile_for_h200(logits, jax.ShapeDtypeStruct((batch, 1, 2304), bf16), embed)
    return [launch.name for launch in program.launches]


@pytest.mark.parametrize(
    ("batch", "deterministic", "options"),
    [(1, False, GEMMA), (32, False, GEMMA), (1, False, GRANITE), (1, True, GEMMA | GRANITE)],
)
def test_limit_and_divisor_of_logits_add_at_most_one_launch_to_the_head(
    batch: int, deterministic: bool, options: dict[str, float]
) -> None:
    plain, own = launches(batch, deterministic, {}), launches(batch, deterministic, options)
    assert len(plain) == 1
    assert len(own) <= 2, own
    if deterministic:
        assert plain == ["deterministic_matmul"] and len(own) == 2, "control: no kernel is fused with this product"
