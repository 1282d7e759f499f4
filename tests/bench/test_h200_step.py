"""Step times of one request with an 8B target on an H200, compared with the limits in the README."""

from __future__ import annotations

import pytest

from jspec import Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.tools.bench import random_models, step

SHAPE, DTYPE = "llama3-8b", "bfloat16"
LIMITS = {"none": 4.6, "chain:4": 5.7, "topk:60,8,10": 7.0}  # milliseconds, by tree


@pytest.fixture(scope="module")
def target() -> Model:
    return random_models.random_target(SHAPE, DTYPE)


@pytest.fixture(scope="module")
def head() -> EagleHead:
    return random_models.random_head(SHAPE, DTYPE)


@pytest.mark.h200
@pytest.mark.parametrize("tree", LIMITS)
def test_step_time_of_one_request_on_an_8b_model_is_within_the_readme_limit(
    tree: str, target: Model, head: EagleHead
) -> None:
    """No draft is accepted; the time is measured once, so a slow process fails and is not tried again."""
    drafted = None if tree == "none" else Tree.parse(tree)
    case = step.StepCase(SHAPE, batch=1, context=1024, tree=drafted, page_size=16, dtype=DTYPE)
    timing = step.measure(case, target, head)
    print(timing)
    assert timing.floor is not None
    # A step faster than its floor has not done its work; more than a token a step has had its draft accepted.
    assert timing.floor < timing.milliseconds <= LIMITS[tree]
    assert timing.tokens < 1.1


@pytest.mark.h200
def test_step_time_of_the_reference_implementation_is_above_the_readme_limit(target: Model) -> None:
    """Negative control: the step without drafting, on the reference implementations of the kernels."""
    case = step.StepCase(SHAPE, batch=1, context=1024, tree=None, dtype=DTYPE, implementation="reference")
    timing = step.measure(case, target, None)
    print(f"references, none: {timing.milliseconds:.3f} ms")
    assert timing.milliseconds > LIMITS["none"]
