"""Test new weights with every drafter, kind of weights and layout: the bits and the drafts of a fresh engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import (
    MTP,
    UNO,
    DFlash,
    DFlash2,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Gemma4Assistant,
    Medusa,
    Model,
    NGram,
    PEagle,
    Suffix,
    Tree,
)
from jspec.draft.base import Drafter
from jspec.draft.beside import Beside
from jspec.models.exchange import from_names
from jspec.step import new_weights, side
from jspec.step.program import Params
from jspec.step.weights_off_devices import arrays_of, with_arrays
from tests.models.test_exchange import tensors_of
from tests.support import folders, quantized_folders, tiny
from tests.support.arrays import on_device
from tests.support.brittle import Fault
from tests.support.engines import make

pytestmark = pytest.mark.once

VOCAB = 128
OPTIONS: dict[str, Any] = dict(slots=2, max_len=48, page_size=4, buckets=(2,), prefill_buckets=(32,), controls=False)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 2]]
FEATURES = (1, 2)


@cache
def old_arrays(folder: Path) -> dict[str, np.ndarray]:
    return tensors_of(folder / "families" / "llama")


def new_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return arrays of the same names, each reversed along its axes and 1.5 times as large."""
    return {name: np.flip(values) * np.float32(1.5) for name, values in old_arrays(folder).items()}


@cache
def target(folder: Path, *, is_new: bool = False) -> Model:
    old = tiny.load_target(folder / "families" / "llama")
    return from_names(new_arrays(folder), old.config, "float32") if is_new else old


def head(model: Model, seed: int) -> Eagle3:
    return Eagle3(tiny.eagle_head(model, draft_vocab=100, feature_layers=FEATURES, seed=seed), Tree.chain(2))


def drafting(model: Model, seed: int) -> Model:
    return tiny.model(VOCAB, layers=1, hidden=32, seed=seed)


CHAIN = Tree.chain(2)
DRAFTERS: dict[str, Callable[[Model, int], Drafter | None]] = {
    "none": lambda model, seed: None,
    "eagle": lambda model, seed: Eagle(tiny.eagle1_head(model, seed=seed), CHAIN),
    "eagle3": head,
    "peagle": lambda model, seed: PEagle(
        tiny.peagle_head(model, draft_vocab=100, feature_layers=FEATURES, seed=seed), CHAIN
    ),
    "dflash": lambda model, seed: DFlash(
        tiny.dflash_head(model, block_size=3, feature_layers=FEATURES, seed=seed), CHAIN
    ),
    "dflash2": lambda model, seed: DFlash2(
        tiny.dflash2_head(model, block_size=3, feature_layers=FEATURES, seed=seed), CHAIN
    ),
    "dspark": lambda model, seed: DSpark(
        tiny.dspark_head(model, block_size=3, feature_layers=FEATURES, seed=seed), CHAIN
    ),
    "medusa": lambda model, seed: Medusa(tiny.medusa_heads(model, 2, seed=seed), CHAIN),
    "assistant": lambda model, seed: Gemma4Assistant(
        tiny.assistant_head(model, clusters=32, top_clusters=3, seed=seed), CHAIN
    ),
    "uno": lambda model, seed: UNO(tiny.uno_adapter(model, seed=seed), CHAIN),
    "mtp": lambda model, seed: MTP(tiny.mtp_head(model, seed=seed), CHAIN),
    "beside": lambda model, seed: Beside(head(model, seed), NGram(CHAIN), "beside"),
    "draft model": lambda model, seed: DraftModel(drafting(model, seed), CHAIN),
    "draft model apart": lambda model, seed: DraftModel(drafting(model, seed), CHAIN, device=jax.devices()[2]),
    "suffix": lambda model, seed: Suffix(CHAIN, scope="engine", corpus_tokens=256),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "2 devices": {"tensor_parallel": 2},
}


def weights_of(engine: Engine) -> Any:
    """Return all arrays that an engine computes with, as numpy arrays with their dtypes and devices."""
    runner = engine.core.runner
    sides = [side.params for side in dict.fromkeys((runner.draft_side, runner.target_side))]
    held = arrays_of(runner.program.drafter)
    return [
        (np.asarray(leaf), leaf.dtype, leaf.sharding)
        for leaf in jax.tree.leaves((runner.params, sides, held))
        if isinstance(leaf, jax.Array)
    ]


def differing(first: Engine, second: Engine) -> int:
    """Return the number of arrays that differ, or are on other devices, between two engines."""
    pairs = zip(weights_of(first), weights_of(second), strict=True)
    return sum(one[1:] != other[1:] or not np.array_equal(one[0], other[0]) for one, other in pairs)


def on_another_device(leaf: Any) -> Any:
    return jax.device_put(leaf, jax.devices()[3]) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_updated_engine_has_the_weights_of_a_fresh_engine_bit_for_bit(drafter: str, kind: str, golden: Path) -> None:
    """An engine's programs take weights as arguments, so with equal ones they compute the same."""
    made, fields, new = DRAFTERS[drafter], OPTIONS | KINDS[kind], target(golden, is_new=True)
    with (
        make(target(golden), made(new, 1), **fields) as engine,
        make(new, made(new, 1), **fields) as kept,
        make(new, made(new, 2), **fields) as fresh,
    ):
        assert differing(engine, kept), "control"
        # The adapter of UNO is on the host, and its arrays on the devices are made when it is bound.
        has_weights = bool(arrays_of(engine.core.runner.program.drafter)) or drafter == "uno"
        for weights in (new, new_arrays(golden), jax.device_put(new, jax.devices()[3])):
            engine.update_weights(target(golden), drafter="keep")
            engine.update_weights(weights, drafter="keep")
            assert differing(engine, kept) == 0
        assert bool(differing(engine, fresh)) == has_weights, "control: another drafter"
        if has_weights:
            elsewhere = made(new, 2)
            if engine.core.runner.program.mesh is None and elsewhere.mesh is None:  # else it has devices of its own
                elsewhere = with_arrays(elsewhere, on_another_device)
            engine.update_weights(new, drafter=elsewhere)
            assert differing(engine, fresh) == 0


def outputs(engine: Engine) -> tuple[list[list[int]], int]:
    """Return the tokens of all prompts, greedy and drawn ones, and the number of accepted draft tokens."""
    before = engine.metrics.num_accepted_tokens
    done = engine.generate(PROMPTS, max_tokens=16, temperature=0.0)
    done += engine.generate(PROMPTS, max_tokens=16, temperature=1.0, seed=5)
    return [c.token_ids for c in done], engine.metrics.num_accepted_tokens - before


SHORT = {
    ("plain", "mtp"),
    ("plain", "draft model apart"),
    ("int8", "eagle3"),
    ("int4", "beside"),
    ("2 devices", "eagle3"),
}
CASES = [(kind, drafter) for kind in KINDS for drafter in DRAFTERS if drafter != "suffix"]


@pytest.mark.parametrize(
    ("kind", "drafter"), [case if case in SHORT else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_updated_engine_has_the_tokens_and_drafts_of_a_fresh_engine_and_compiles_nothing(
    kind: str, drafter: str, golden: Path, compilations: Any
) -> None:
    made, fields, new = DRAFTERS[drafter], OPTIONS | KINDS[kind], target(golden, is_new=True)
    with make(target(golden), made(new, 1), **fields) as engine, make(new, made(new, 1), **fields) as fresh:
        before, wanted = outputs(engine), outputs(fresh)
        programs = dict(engine.core.runner.programs.compiled)
        update = engine.update_weights(new_arrays(golden), drafter="keep")
        assert outputs(engine) == wanted
        assert engine.core.runner.programs.compiled == programs, "no program was compiled"
        assert update.version == engine.weight_version == 1
        assert before[0] != wanted[0], "control"
        engine.scheduler.pages.check()


def shifting(by: int) -> Model:
    """Return a target after whose token t the most likely one is t + ``by``: its layers add nothing."""
    model = tiny.model(16, layers=1, hidden=32)
    layer = model.layers[0].replace(o=0 * model.layers[0].o, down=0 * model.layers[0].down)
    rows = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    ones = np.ones(32, np.float32)
    arrays = [on_device(values) for values in (rows, ones, np.roll(rows, by, axis=0))]
    return model.replace(layers=[layer], **dict(zip(("embed", "norm", "head"), arrays, strict=True)))


def test_head_that_was_not_bound_to_the_new_target_drafts_nothing_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE-1 head that passes the root's embedding on drafts what the output head that it shares says."""
    parts = tiny.eagle1_head(shifting(1))
    passes = on_device(np.eye(32, 64, dtype=np.float32))
    layer = parts.layers[0].replace(o=0 * parts.layers[0].o, down=0 * parts.layers[0].down)
    drafter = Eagle(parts.replace(fc=passes, fc_bias=0 * parts.fc_bias, layers=[layer]), CHAIN)
    fields = {"max_tokens": 15, "temperature": 0.0}

    def length() -> float:
        done = engine.generate([[3]], fields)[0]
        by = done.token_ids[0] - 3
        assert done.token_ids == [(3 + by * (step + 1)) % 16 for step in range(15)]
        return done.metrics.mean_acceptance_length

    with make(shifting(1), drafter, **OPTIONS) as engine:
        lengths = [length()]
        old = engine.core.runner.params.draft
        engine.update_weights(shifting(5))
        lengths.append(length())
        monkeypatch.setattr(new_weights, "bound", lambda model, *_: Params(target=model, draft=old))
        engine.update_weights(shifting(5))
        lengths.append(length())
    assert lengths[:2] == [3.0, 3.0]
    assert lengths[2] == 1.0, "control: the old output head"


def test_weights_that_are_not_quantised_as_the_stored_target_is_are_refused(golden: Path, tmp_path: Path) -> None:
    """Scales that a checkpoint stores belong to its weights alone."""
    form = quantized_folders.FORMATS["fp8 by block"]
    stored, wide = quantized_folders.quantised(form)
    folder = quantized_folders.write(tmp_path / "fp8", form, stored)
    unquantised = Model.from_pretrained(folders.write(tmp_path / "wide", quantized_folders.CONFIG, wide))
    with make(Model.from_pretrained(folder), **OPTIONS) as engine:
        wanted = weights_of(engine)
        with pytest.raises(ValueError, match="expected weights in fp8, as the engine's are, got unquantised ones: the"):
            engine.update_weights(unquantised)
        engine.update_weights(folder)
        assert engine.weight_version == 1
        assert all(np.array_equal(one[0], other[0]) for one, other in zip(weights_of(engine), wanted, strict=True))
    with make(unquantised, **OPTIONS) as engine:
        with pytest.raises(ValueError, match="expected unquantised weights, as the engine's are, got weights in fp8; "):
            engine.update_weights(folder)
        assert engine.weight_version == 0


def test_donated_heads_and_targets_without_layers_are_refused_on_two_devices(golden: Path) -> None:
    new = target(golden, is_new=True)
    donated = head(new, 2)
    for leaf in arrays_of(donated):
        leaf.delete()
    with make(target(golden), head(new, 1), **OPTIONS, tensor_parallel=2) as engine:
        wanted = weights_of(engine)
        for weights, drafter, message in (
            (new, donated, "update_weights: drafter: expected arrays, got some that were deleted"),
            (new.replace(layers=new.layers[:1]), None, "expected the 4 layers of the model's config, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.update_weights(weights, drafter=drafter)
        assert engine.weight_version == 0
        assert all(np.array_equal(one[0], other[0]) for one, other in zip(weights_of(engine), wanted, strict=True))


def test_engine_whose_draft_model_gets_no_memory_sleeps_on_and_holds_none(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = target(golden)
    apart = DRAFTERS["draft model apart"](new, 1)
    with make(new, apart, **OPTIONS) as engine:
        wanted, sides = outputs(engine), engine.core.runner._sides
        engine.sleep(weights="host")
        for failing in (1, 2):
            with monkeypatch.context() as patch:
                error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes")
                patch.setattr(side, "make_state", Fault(side.make_state, failing, error))
                with pytest.raises(ValueError, match="out of memory at start"):
                    engine.wake_up()
            assert engine.is_sleeping
            held = [leaf for each in sides for leaf in jax.tree.leaves((each.state, each.params))]
            assert not any(isinstance(leaf, jax.Array) for leaf in held)
        engine.wake_up()
        assert outputs(engine) == wanted
