"""Test the trainer of heads between rollouts: weights of other training loops, acceptance, and what leaves it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jspec import (
    MTP,
    Beside,
    Completion,
    DFlash,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Gemma4Assistant,
    Medusa,
    Metrics,
    Model,
    NGram,
    PEagle,
    Suffix,
    Tree,
)
from jspec.models.weights.quantize import quantize_weights
from jspec.train import HeadTrainer, eagle3, fit, online, write
from jspec.train.config import TrainConfig
from jspec.train.loop import LossError
from jspec.train.methods import METHODS
from jspec.train.observe import observe
from tests.support import tiny
from tests.support.engines import make
from tests.train import runs, support

pytestmark = pytest.mark.once

VOCAB, TTT = 40, 3
OPTIONS: dict[str, Any] = dict(length=64, batch=4, learning_rate=1e-2)
ENGINE: dict[str, Any] = dict(slots=16, max_len=64, page_size=16, buckets=(16,), prefill_buckets=(16,), controls=False)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (48, 5)).tolist()


@pytest.fixture(autouse=True)
def known_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "TrainingProgram", runs.KnownTraining)


@cache
def target(seed: int = 0) -> Model:
    return tiny.model(VOCAB, layers=2, sharpness=8.0, seed=seed)


def medusa() -> Medusa:
    return Medusa(tiny.medusa_heads(target(), TTT), Tree.chain(TTT))


def eagle3_head(*, shares: bool, draft_vocab: int = VOCAB) -> Eagle3:
    """Return an EAGLE-3 head; one that shares has the target's output head, as all have its embedding."""
    head = tiny.eagle_head(target(), draft_vocab=draft_vocab, feature_layers=(0, 1, 2))
    head = dataclasses.replace(head, head=None, draft_to_target=None) if shares else head
    return Eagle3(head, Tree.chain(TTT))


def dspark() -> DSpark:
    return DSpark(tiny.dspark_head(target(), block_size=TTT, feature_layers=(1, 2)), Tree.chain(TTT))


def completion(prompt: Sequence[int], tokens: Sequence[int]) -> Completion:
    none: dict[str, Any] = dict(text=None, from_draft=[False] * len(tokens), stop_reason=None, error=None)
    metrics = Metrics(num_tokens=len(tokens))
    return Completion(token_ids=[*tokens], prompt_token_ids=[*prompt], finish_reason="length", metrics=metrics, **none)


def completions(count: int = 6, *, vocab: int = VOCAB, size: int = 30) -> list[Completion]:
    """Return random completions of ``size`` tokens and more, of which the first four are the prompt."""
    rng = np.random.default_rng(count)
    return [completion(*np.split(rng.integers(0, vocab, size + index), [4])) for index in range(count)]


def head_of(drafter: Any) -> Any:
    return drafter.heads if isinstance(drafter, Medusa) else drafter.head


def arrays(drafter: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(head_of(drafter))]


def differs(one: Any, other: Any) -> bool:
    return any(not np.array_equal(*pair) for pair in zip(arrays(one), arrays(other), strict=True))


def test_weights_are_those_of_fit_on_the_same_texts_at_a_constant_rate(tmp_path: Path) -> None:
    """Completions are lines of prompt and completion: packed, ordered and counted alike, bit for bit."""
    folder = runs.target_folder(tmp_path / "target")
    model = Model.from_pretrained(folder, dtype="float32")
    options: dict[str, Any] = dict(method="eagle3", ttt=2, length=32, batch=2, learning_rate=5e-3)
    method = METHODS["eagle3"](TrainConfig(feature_layers=(0, 1, 3), **options))
    first = method.create(model, np.arange(32, 256, 2))
    write.write_head(tmp_path / "first", *method.files(first, model, {}))
    made = completions(7, vocab=96)
    made = [completion(np.add(c.prompt_token_ids, 32), np.add(c.token_ids, 32)) for c in made]
    texts = [{"prompt": bytes(c.prompt_token_ids).decode(), "completion": bytes(c.token_ids).decode()} for c in made]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    constant: dict[str, Any] = dict(warmup=0.0, final=1.0, held_out=0.0, eval_every=99, epochs=2.0)
    init: dict[str, Any] = dict(init=str(tmp_path / "first"), tokenizer="bytes")
    result = fit(folder, tmp_path / "texts.jsonl", tmp_path / "out", **init, **constant, **options)
    del options["method"]
    trainer = HeadTrainer(tmp_path / "first", folder, epochs=2.0, **options)
    report = trainer.update(made)
    assert len(report.losses) == result.steps > 6
    wanted = Eagle3.from_pretrained(result.out, dtype="float32")
    before = Eagle3.from_pretrained(tmp_path / "first", dtype="float32")
    for found, fitted in zip(arrays(trainer.drafter), arrays(wanted), strict=True):
        np.testing.assert_array_equal(found, fitted)
    assert differs(wanted, before), "control: fit changed them"
    assert trainer.drafter.tree == Tree.chain(5), "that of an engine with the path"


def test_updates_are_those_of_an_optax_loop_whose_embedding_and_output_head_are_the_next_targets() -> None:
    drafter, made = eagle3_head(shares=True), completions(4, size=40)  # one a row, so that the order does not matter
    trainer = HeadTrainer(drafter, target(), **OPTIONS)
    for model in (target(), target(7), target(7)):
        trainer.update(made, model)
    texts = [np.array(c.prompt_token_ids + c.token_ids) for c in made]
    rows = support.packed([(text, np.arange(len(text)) >= 4) for text in texts], OPTIONS["length"])

    def loss(trained: Any, model: Model, shared: Model) -> jax.Array:
        seen = observe(model, rows, (0, 1, 2))
        head = trained.replace(embed=shared.embed, head=shared.output_head)
        every = eagle3.loss(head, model, seen, rows, eagle3.Eagle3Loss(TTT, 0.8))[0]
        return every / rows.tokens.size

    def trained_on(*targets: tuple[Model, Model]) -> Any:
        changes = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, 0.9, 0.95, weight_decay=0.0))
        weights = drafter.head
        state = changes.init(weights)
        for model, shared in targets:
            step, state = changes.update(gradient(weights, model, shared), state, weights)
            weights = optax.apply_updates(weights, step)
        return weights

    gradient = jax.jit(jax.grad(loss))
    old, new = target(), target(7)
    found = arrays(trainer.drafter)
    wanted = jax.tree.leaves(trained_on((old, old), (new, new), (new, new)))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    stale = jax.tree.leaves(trained_on((old, old), (new, old), (new, old)))
    assert max(np.abs(one - other).max() for one, other in zip(found, stale, strict=True)) > 1e-2, "control"
    assert trainer.drafter.head.head is None and trainer.drafter.head.embed is None


SEEDS = dict(temperature=1.0, max_tokens=40)


def rollouts(engine: Engine, first: int) -> list[Completion]:
    return engine.generate(PROMPTS, [{**SEEDS, "seed": first + index} for index in range(len(PROMPTS))])


def tokens_of(done: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


def rounds_of(done: Sequence[Completion]) -> int:
    return sum(c.metrics.num_drafts for c in done)


@pytest.mark.slow
@pytest.mark.parametrize("make_drafter", [partial(eagle3_head, shares=True), dspark], ids=["eagle3", "dspark"])
def test_trained_head_needs_fewer_rounds_than_the_frozen_one_for_the_same_texts(
    make_drafter: Callable[[], Drafter],
) -> None:
    """Its teacher must be the new target: one trained on the old target's states and choices drafts worse."""
    drafter = make_drafter()
    with make(target(), drafter, **ENGINE) as engine:
        engine.update_weights(target(7))
        done, asked = rollouts(engine, 0), {}
        for name, model in {"new": target(7), "old": target()}.items():
            trainer = HeadTrainer(drafter, target(), **{**OPTIONS, "batch": 16, "epochs": 30.0, "learning_rate": 2e-2})
            report = trainer.update(done, model)
            assert report.losses[-1] < 0.8 * report.losses[0]
            engine.update_weights(target(7), drafter=trainer.drafter)
            asked[name] = rollouts(engine, 1000)
        engine.update_weights(target(7), drafter=drafter)
        asked["frozen"] = rollouts(engine, 1000)
    assert tokens_of(asked["new"]) == tokens_of(asked["frozen"]) == tokens_of(asked["old"]), "paired seeds"
    new, old, frozen = (rounds_of(asked[name]) for name in ("new", "old", "frozen"))
    assert new < 0.95 * frozen and new < 0.95 * old


def test_second_update_with_another_target_and_other_lengths_compiles_nothing(compilations: list[str]) -> None:
    trainer = HeadTrainer(medusa(), target(), seed=1, **OPTIONS)  # no other test has this program
    assert len(trainer.update(completions(2), target(7)).losses) == 1
    first = trainer.drafter
    assert any("backend_compile" in event for event in compilations), "control"
    compilations.clear()
    for count, seed in ((9, 3), (2, 4)):
        trainer.update(completions(count), target(seed))
        assert differs(trainer.drafter, first)
    assert not [event for event in compilations if "backend_compile" in event]


def test_weights_that_left_are_those_of_then_and_an_engine_takes_them_while_it_runs() -> None:
    drafter = medusa()
    trainer, before = HeadTrainer(drafter, target(), **OPTIONS), arrays(drafter)
    trainer.update(completions())
    left = trainer.drafter
    kept = arrays(left)
    params = dict(temperature=0.0, max_tokens=30)
    with make(target(), drafter, **ENGINE) as engine:
        wanted = engine.generate(PROMPTS[:4], **params)
        asked = [engine.submit(prompt, **params) for prompt in PROMPTS[:4]]
        engine.update_weights(target(), drafter=left, copy=False)
        for _ in range(3):
            trainer.update(completions())
        done = [engine.result(request) for request in asked]
        assert tokens_of(done) == tokens_of(wanted) == tokens_of(engine.generate(PROMPTS[:4], **params))
        engine.sleep()
        trainer.update(completions())
        engine.wake_up()
        engine.update_weights(target(), drafter=trainer.drafter)
        assert tokens_of(engine.generate(PROMPTS[:4], **params)) == tokens_of(wanted)
    for found, then in ((left, kept), (drafter, before)):
        for one, other in zip(arrays(found), then, strict=True):
            np.testing.assert_array_equal(one, other)
    assert differs(left, trainer.drafter) and differs(left, drafter), "control"


def test_head_on_two_devices_is_that_of_one_and_goes_to_an_engine_on_one_device() -> None:
    trained = {}
    for devices in (1, 2):
        trainer = HeadTrainer(medusa(), target(), devices=devices, **OPTIONS)
        for seed in (7, 8):
            trainer.update(completions(), target(seed))
        trained[devices] = trainer.drafter
    for one, two in zip(arrays(trained[1]), arrays(trained[2]), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)
    assert differs(trained[1], medusa()), "control"
    with make(target(), medusa(), **ENGINE) as engine:
        engine.update_weights(target(), drafter=trained[2])
        assert engine.generate(PROMPTS[0], max_tokens=2)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_head_in_bfloat16_stays_so_for_targets_in_either_dtype(method: str) -> None:
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target())
    block = DFlash(tiny.dflash_head(target(), block_size=TTT + 1, feature_layers=(1, 2)), Tree.chain(TTT))
    whole = {"eagle3": eagle3_head(shares=False, draft_vocab=24), "dflash": block}[method]
    head = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, whole.head)
    drafter = type(whole)(head, whole.tree)
    trainer = HeadTrainer(drafter, halves, **OPTIONS)
    first = trainer.update(completions())
    last = [trainer.update(completions(), model) for model in (halves, target())]
    assert last[-1].figures.loss < first.figures.loss
    left = trainer.drafter
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, head)
    same = HeadTrainer(type(whole)(wide, whole.tree), halves, **OPTIONS)
    for model in (None, halves, target()):
        same.update(completions(), model)
    for rounded, exact in zip(arrays(left), arrays(same.drafter), strict=True):  # updates add up in float32
        np.testing.assert_array_equal(rounded, exact.astype(rounded.dtype))
    assert jax.tree.map(lambda leaf: leaf.dtype, left.head) == jax.tree.map(lambda leaf: leaf.dtype, head)
    with make(halves, drafter, **ENGINE) as engine:
        engine.update_weights(halves, drafter=left)
        assert differs(left, drafter)


def test_new_target_may_be_names_a_folder_or_on_another_device(tmp_path: Path) -> None:
    folder = runs.target_folder(tmp_path / "target")
    model = Model.from_pretrained(folder, dtype="float32")
    drafter = Medusa(tiny.medusa_heads(model, TTT), Tree.chain(TTT))
    tensors = {name: 1.1 * values for name, values in runs.weights(folder).items()}
    found = []
    for weights in (folder, model, jax.device_put(model, jax.devices()[1]), jax.tree.map(np.array, model), tensors):
        trainer = HeadTrainer(drafter, model, **OPTIONS)
        trainer.update(completions(), weights)
        found.append(trainer.drafter)
    assert not any(differs(found[0], other) for other in found[1:4])
    assert differs(found[0], found[4]), "control"


def test_head_beside_a_look_up_is_trained_and_the_look_up_stays() -> None:
    drafter = Beside(medusa(), Suffix(Tree.chain(TTT), scope="engine"))
    trainer, alone = HeadTrainer(drafter, target(), **OPTIONS), HeadTrainer(medusa(), target(), **OPTIONS)
    for each in (trainer, alone):
        each.update(completions())
    left: Any = trainer.drafter
    assert left.lookup is drafter.lookup and left.tree == drafter.tree
    assert not differs(left.model, alone.drafter) and differs(left.model, drafter.model)
    with make(target(), drafter, **ENGINE) as engine:
        engine.update_weights(target(), drafter=left)


def test_quantised_target_teaches_by_its_own_states() -> None:
    drafter, quantised = eagle3_head(shares=True), quantize_weights(target(), "int8")
    trainer, plain = HeadTrainer(drafter, quantised, **OPTIONS), HeadTrainer(drafter, target(), **OPTIONS)
    losses = [trainer.update(completions(), quantised).figures.loss for _ in range(3)]
    assert losses[2] < losses[0]
    near = plain.update(completions()).figures.loss
    assert near == pytest.approx(losses[0], rel=0.1) and near != losses[0]
    with pytest.raises(ValueError, match="target: expected a model like the first, got another"):
        trainer.update(completions(), target())


def test_report_counts_what_is_divided_and_left_out() -> None:
    trainer = HeadTrainer(medusa(), target(), **OPTIONS)
    first, second = completions(2)
    first = dataclasses.replace(first, others=(completion([1, 2], [3]), completion([1], [2])))  # one is too short
    long, no_tokens = completion([1] * 70, [2] * 60), completion([1, 2, 3], [])
    report = trainer.update([first, *first.others, second, long, no_tokens])
    assert (report.completions, report.divided, report.left_out) == (6, 1, 2)
    assert report.left_out_tokens == 64 + 2 + 2 + 3, "a part of the prompt alone, the end, the short one, the prompt"
    held = (30 + 3, 31, 64)
    assert report.rows == 3 and report.tokens - sum(held) in held, "one row fills the batch"
    assert len(report.figures.hits) == TTT and len(report.losses) == 1


def test_threads_update_and_take_drafters_at_once_and_the_given_head_may_be_deleted() -> None:
    drafter = eagle3_head(shares=False)
    drafter.head = jax.tree.map(jnp.array, drafter.head)
    trainer = HeadTrainer(drafter, target(), **OPTIONS)
    for leaf in jax.tree.leaves(drafter.head):
        leaf.delete()

    def work(number: int) -> float:
        losses = [trainer.update(completions(4 + number), target()).losses[-1] for _ in range(3) if trainer.drafter]
        return losses[-1]

    with ThreadPoolExecutor(3) as pool:
        assert np.isfinite(list(pool.map(work, range(3)))).all()
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(trainer.drafter.head))  # type: ignore[attr-defined]


def test_update_that_is_not_finite_names_completions_and_leaves_the_weights() -> None:
    drafter = medusa()
    trainer = HeadTrainer(drafter, target(), **OPTIONS)
    broken = target().replace(norm=target().norm * np.nan)
    with pytest.raises(
        LossError, match="update 1: expected a finite loss and gradient, got others on completions 0, 1"
    ):
        trainer.update(completions(2), broken)
    assert not differs(trainer.drafter, drafter)
    trainer.update(completions(2), target())
    assert differs(trainer.drafter, drafter)


def without_a_head() -> Iterator[tuple[Any, str]]:
    advice = 'draft with jspec.Suffix(tree, scope="engine")'
    yield from ((drafter, advice) for drafter in (NGram(), Suffix(), None, "suffix"))
    yield Eagle(tiny.eagle1_head(target()), Tree.chain(2)), advice
    yield PEagle(tiny.peagle_head(target(), draft_vocab=24, feature_layers=(0, 1, 2)), Tree.chain(2)), advice
    yield Gemma4Assistant(tiny.assistant_head(target()), Tree.chain(2)), advice
    yield MTP(tiny.mtp_head(target()), Tree.chain(2)), "train the layer with the target and pass jspec.MTP"
    yield DraftModel(target(), Tree.chain(2)), "train the model by itself and pass jspec.DraftModel"


def test_drafters_without_a_head_to_train_are_refused_with_what_to_do() -> None:
    for drafter, remedy in without_a_head():
        with pytest.raises(ValueError, match=re.escape(remedy)) as caught:
            HeadTrainer(drafter, target())
        assert "HeadTrainer: drafter: expected Eagle3, DFlash, DSpark or Medusa, got" in str(caught.value)


def test_bad_heads_options_targets_and_completions_are_refused() -> None:
    quantised = Eagle3(quantize_weights(eagle3_head(shares=False).head, "int8"), Tree.chain(2))
    wide = tiny.model(VOCAB, layers=2, hidden=32)
    for drafter, options, message in (
        (quantised, {}, "HeadTrainer: drafter: expected a head without quantised weights"),
        (Medusa(tiny.medusa_heads(wide, 2)), {}, "Medusa: hidden size: the target has 16, the heads have 32"),
        (medusa(), {"rope_theta": 1e4}, "HeadTrainer: rope_theta: expected the options epochs, length, "),
        (medusa(), {"gamma": 2.0}, "train: gamma: expected none with method 'medusa'"),
        (medusa(), {"ttt": 2}, "train: ttt: expected 3, which the head of drafter drafts, got 2"),
        (medusa(), {"length": 40}, "train: length: expected a multiple of 16, got 40"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            HeadTrainer(drafter, target(), **options)
    divided = target().replace(mesh=Mesh(np.array(jax.devices()[:2]), ("model",)))
    with pytest.raises(ValueError, match="HeadTrainer: target: expected weights on one device, got some over Mesh"):
        HeadTrainer(medusa(), divided)
    trainer = HeadTrainer(medusa(), target(), **OPTIONS)
    donated = jax.tree.map(jnp.array, target(7))
    trainer.update(completions(2), donated)
    donated.norm.delete()
    with pytest.raises(ValueError, match="HeadTrainer: target: expected arrays, got some that were deleted"):
        HeadTrainer(medusa(), donated)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (completions(2), wide, ValueError, "target: expected a model like the first, got another (hidden_size"),
        (completions(2), 5, TypeError, "HeadTrainer.update: target: expected a Model, a mapping of arrays"),
        (
            completions(2),
            donated,
            ValueError,
            "HeadTrainer.update: target: expected arrays, got some that were deleted",
        ),
        (completions(2), None, ValueError, "HeadTrainer.update: target: None: expected arrays, got some that were"),
        ([[1, 2, 3]], None, TypeError, "HeadTrainer.update: expected completions of an engine, got [1, 2, 3]"),
        ([completion([1] * 80, [])], None, ValueError, "expected completions with 3 tokens or more, prompt included"),
        (
            [completion([1], [VOCAB, 1])],
            None,
            ValueError,
            "expected token ids below 40, the target's vocabulary, got 40",
        ),
        ([], None, ValueError, "got 0 without such; give others, or raise length above the prompts"),
    ]
    for made, model, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            trainer.update(made, model)
    trainer.update(completions(2), target())
