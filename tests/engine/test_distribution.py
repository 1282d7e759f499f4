"""Test that the tokens an engine samples over several rounds have the target's joint distribution."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec import (
    MTP,
    UNO,
    Beside,
    DFlash,
    DFlash2,
    Drafter,
    DraftModel,
    DSpark,
    Eagle3,
    Engine,
    Gemma4Assistant,
    Medusa,
    Model,
    PEagle,
    SamplingParams,
    Tree,
)
from jspec.core.accept_rule import DraftSampling
from jspec.core.records import Draft, SlotView
from jspec.draft import draft_model, dspark, match_rates
from jspec.draft.base import DraftState, Params, StatelessDrafter
from jspec.sampling import sampler
from tests.reference import decoder, processors
from tests.reference.thinking import Budget
from tests.support import tiny
from tests.support.arrays import on_device
from tests.support.beside import Known, check_sources
from tests.support.lettered import Thoughtful

pytestmark = pytest.mark.once

VOCAB, TOKENS, PROMPT, SAMPLES = 5, 5, [1, 3], 1200
CONTROLS = {
    "plain": dict(temperature=1.0),
    "restricted": dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.02),
    "penalised": dict(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.7),
    "banned": dict(temperature=1.2, bad_words=[[2, 2], [3, 1, 2]], logit_bias={3: 1.0}, top_p=0.95),
}
START, END, ENDING = 3, 2, [1, 4, 2]  # markers of reasoning, which the prompt begins, and tokens that end it
THINKING = dict(temperature=1.0, thinking_budget=1)


@cache
def model() -> Model:
    return tiny.model(VOCAB, seed=1, sharpness=1.5)


@pytest.fixture(scope="module")
def target() -> Model:
    return model()


def deviation(completions: list, expected: np.ndarray) -> float:
    """Return the z score of Pearson's chi-square test of the exact distribution; cells expecting under 5 are pooled."""
    cells = np.array([np.ravel_multi_index(c.token_ids, expected.shape) for c in completions])
    counts = np.bincount(cells, minlength=expected.size)
    wanted = expected.ravel() * len(completions)
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 5:  # impossible tokens must not occur at all
        assert counts[-1] <= stats.poisson.isf(1e-7, max(wanted[-1], 1e-12))
        counts, wanted = counts[:-1], wanted[:-1]
    df = len(wanted) - 1
    return float((((counts - wanted) ** 2 / wanted).sum() - df) / np.sqrt(2 * df))


def draw(engine: Engine, count: int, *controls: dict[str, Any]) -> list[list]:
    """Return samples under each of several sets of penalties, drawn in one batch with greedy rows."""
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, **own) for seed in range(count) for own in controls]
    greedy = [SamplingParams(max_tokens=TOKENS, temperature=0)] * (count // 20)
    done = engine.generate([PROMPT] * (len(params) + len(greedy)), [*params, *greedy])
    alone = engine.generate([PROMPT], greedy[0])[0].token_ids
    assert all(c.token_ids == alone for c in done[len(params) :]), "sampled rows change greedy ones"
    return [done[index : len(params) : len(controls)] for index in range(len(controls))]


@cache
def expected_probs(name: str, counted: int = TOKENS) -> np.ndarray:
    """Compute the joint distribution by enumerating all texts, with logits edited by transformers' processors.

    Args:
        counted: number of output tokens that the processors see.
    """
    params = SamplingParams(**CONTROLS[name])

    def edit(row: np.ndarray, output: np.ndarray) -> np.ndarray:
        return processors.edited(row, PROMPT, output[:counted].tolist(), params, ())

    if params.controls_used:
        cuts = dict(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        return decoder.joint_probs(model(), PROMPT, TOKENS, edit, **cuts)
    return decoder.joint_probs(model(), PROMPT, TOKENS, **CONTROLS[name])


@cache
def thinking_probs() -> np.ndarray:
    """Compute the joint distribution with a thinking budget by enumerating all texts."""
    budget = Budget(START, END, ENDING, 1)

    def edit(row: np.ndarray, output: np.ndarray) -> np.ndarray:
        return budget.edited(row, PROMPT, output.tolist())

    return decoder.joint_probs(model(), PROMPT, TOKENS, edit, temperature=1.0)


def make(target, drafter, accept: str) -> Engine:
    return Engine(
        target,
        drafter=drafter,
        accept=accept,
        slots=64,
        max_len=32,
        page_size=8,
        buckets=(64,),
        prefill_buckets=(64,),
        tokenizer=Thoughtful([b"a", b"b", b"</think>", b"<think>", b"c"]),
        grammar_cells=0,
        thinking_end="bc</think>",
        eos_ids=(),
        prefill_budget=256,  # texts are short: all slots are filled before a round
        prefix_cache=False,
    )


@final
class Table(StatelessDrafter):
    """A drafter that samples each token of a static tree given its parent's token from a random table.

    For rules that use draft probabilities, siblings are sampled without replacement (Gumbel top-k); for other rules
    they are the most likely tokens.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return on_device(np.random.default_rng(3).dirichlet(np.ones(VOCAB), VOCAB), jnp.float32)

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        is_drawn = view.accept.draft_sampling is DraftSampling.OWN_DISTRIBUTION
        parents = self.tree.parents
        tokens = [view.root] * self.tree.nodes
        for node in self.tree.fed:
            children = [child for child, parent in enumerate(parents) if parent == node]
            scores, place = jnp.log(params[tokens[node]]), jnp.full_like(view.lengths, node)
            if is_drawn:
                key = sampler.keys(view.sampling.seed, sampler.Purpose.DRAFT, view.lengths, place)
                scores = scores + sampler.gumbel(key, VOCAB)
            best = jax.lax.top_k(scores, len(children))[1]
            for rank, child in enumerate(children):
                tokens[child] = best[:, rank]
        all_tokens = jnp.stack(tokens, axis=1)
        draft = Draft(
            tokens=all_tokens,
            parents=jnp.broadcast_to(on_device(parents, jnp.int32), all_tokens.shape),
            scores=on_device(np.zeros(all_tokens.shape)),
            valid=on_device(np.ones(all_tokens.shape, bool)),
            probs=params[all_tokens] if is_drawn else None,
            vocab_map=None,
        )
        return draft, state


PAIRS = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
CASES = {
    "coupled chain": ("coupled", Tree.chain(3)),
    "rejection chain": ("rejection", Tree.chain(3)),
    "block chain": ("block", Tree.chain(3)),
    "rejection tree": ("rejection", PAIRS),
    "traversal tree": ("traversal", PAIRS),
    "multi_candidate tree": ("multi_candidate", PAIRS),
}
PADDED = {  # accept rule, tree and number of tokens of the draft model
    "rejection, smaller": ("rejection", PAIRS, VOCAB - 1),
    "rejection, larger": ("rejection", Tree.chain(3), VOCAB + 2),
    "coupled, smaller": ("coupled", Tree.chain(3), VOCAB - 1),
    "coupled, larger": ("coupled", PAIRS, VOCAB + 2),
    "block, smaller": ("block", Tree.chain(3), VOCAB - 1),
    "block, larger": ("block", Tree.chain(3), VOCAB + 2),
    "traversal, smaller": ("traversal", PAIRS, VOCAB - 1),
    "traversal, larger": ("traversal", PAIRS, VOCAB + 2),
    "multi_candidate, smaller": ("multi_candidate", PAIRS, VOCAB - 1),
    "multi_candidate, larger": ("multi_candidate", PAIRS, VOCAB + 2),
}
QUICK = ("rejection chain",)  # with separate noise for draft, acceptance and residual


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in CASES]
)
def test_sampled_tokens_under_lossless_accept_rules_have_the_target_distribution(target, name: str) -> None:
    accept, tree = CASES[name]
    drafter = DraftModel(tiny.model(VOCAB, seed=2), tree) if tree.is_chain else Table(tree)
    engine = make(target, drafter, accept)
    *sampled, thinking = draw(engine, SAMPLES, *CONTROLS.values(), THINKING)
    assert abs(deviation(thinking, thinking_probs())) < 5
    assert deviation(thinking, expected_probs("plain")) > 20, "negative control: no budget"
    for control, done in zip(CONTROLS, sampled, strict=True):
        assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the samples must span several rounds"
        assert abs(deviation(done, expected_probs(control))) < 5
        if control in ("penalised", "banned"):
            assert deviation(done, expected_probs(control, counted=1)) > 20, "negative control: later tokens ignored"


@pytest.mark.long
@pytest.mark.parametrize("name", PADDED)
def test_sampled_tokens_with_a_draft_model_of_padded_vocabulary_have_the_target_distribution(target, name: str) -> None:
    accept, tree, size = PADDED[name]
    engine, names = make(target, DraftModel(tiny.model(size, seed=2), tree), accept), ("plain", "restricted")
    for control, done in zip(names, draw(engine, SAMPLES, *(CONTROLS[name] for name in names)), strict=True):
        assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the samples must span several rounds"
        assert abs(deviation(done, expected_probs(control))) < 5


BLOCKS: dict[str, Callable[[Model, Tree], Drafter]] = {
    "peagle": lambda target, tree: PEagle(tiny.peagle_head(target, draft_vocab=VOCAB, feature_layers=(0, 1)), tree),
    "mtp": lambda target, tree: MTP(tiny.mtp_head(target), tree),
    "dflash": lambda target, tree: DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), tree),
    "dflash2": lambda target, tree: DFlash2(
        tiny.dflash2_head(target, block_size=4, feature_layers=(0, 1), candidates=3), tree
    ),
    "dspark": lambda target, tree: DSpark(tiny.dspark_head(target, block_size=3, feature_layers=(0, 1)), tree),
    "assistant": lambda target, tree: Gemma4Assistant(
        tiny.assistant_head(target, clusters=VOCAB, top_clusters=3), tree
    ),
    "uno": lambda target, tree: UNO(tiny.uno_adapter(target), tree),
    "rnn": lambda target, tree: DSpark(
        tiny.dspark_head(target, block_size=3, feature_layers=(0, 1), markov="rnn"), tree
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "accept", "tree"),
    [
        *(
            (name, accept, tree)
            for name in ("dflash", "dflash2", "dspark")
            for accept, tree in (
                ("block", Tree.chain(3)),
                ("traversal", PAIRS),
                ("multi_candidate", PAIRS),
                ("coupled", Tree.topk(6, 3, 2)),
            )
        ),
        ("dspark", "rejection", Tree.chain(3)),
        ("dflash", "rejection", Tree.chain(3)),
        ("dflash2", "rejection", Tree.chain(3)),
        ("rnn", "rejection", Tree.chain(3)),
        ("mtp", "rejection", Tree.chain(3)),
        ("mtp", "multi_candidate", PAIRS),
        ("peagle", "rejection", Tree.chain(3)),
        ("peagle", "multi_candidate", PAIRS),
        ("assistant", "rejection", Tree.chain(3)),
        ("assistant", "block", Tree.chain(3)),
        ("assistant", "traversal", PAIRS),
        ("assistant", "multi_candidate", PAIRS),
        ("assistant", "coupled", Tree.topk(6, 3, 2)),
        ("uno", "rejection", Tree.chain(3)),
        ("uno", "block", Tree.chain(3)),
        ("uno", "traversal", PAIRS),
        ("uno", "multi_candidate", PAIRS),
    ],
    ids=str,
)
def test_sampled_tokens_with_a_head_for_blocks_have_the_target_distribution(
    target, name: str, accept: str, tree: Tree
) -> None:
    engine, controls = make(target, BLOCKS[name](target, tree), accept), ("plain", "restricted")
    for control, done in zip(controls, draw(engine, SAMPLES, *(CONTROLS[name] for name in controls)), strict=True):
        assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the samples must span several rounds"
        assert abs(deviation(done, expected_probs(control))) < 5


JOINED = {  # accept rule, tree of the head and join
    "rejection, beside": ("rejection", PAIRS, "beside"),
    "traversal, beside": ("traversal", PAIRS, "beside"),
    "multi_candidate, beside": ("multi_candidate", PAIRS, "beside"),
    "rejection, replace": ("rejection", Tree.chain(3), "replace"),
    "block, replace": ("block", Tree.chain(3), "replace"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "rejection, beside" else pytest.mark.long) for name in JOINED]
)
def test_sampled_tokens_with_a_look_up_beside_a_head_have_the_target_distribution(
    target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up's tokens depend on the position. With "replace", one round decides about the chains of the next."""
    accept, tree, join = JOINED[name]
    monkeypatch.setattr(match_rates, "FIRST_TOKENS", 0.5)
    outputs = np.random.default_rng(4).integers(0, VOCAB, (1, TOKENS + 1))
    lookup = Known(outputs, [PROMPT], Tree.chain(3), VOCAB)
    engine = make(target, Beside(Table(tree), lookup, join), accept)
    controls = ("plain", "restricted")
    for control, done in zip(controls, draw(engine, SAMPLES, *(CONTROLS[name] for name in controls)), strict=True):
        assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the samples must span several rounds"
        assert abs(deviation(done, expected_probs(control))) < 5
    check_sources(engine.metrics)
    assert min(engine.metrics.num_accepted_tokens_per_source.values()) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dflash", *(pytest.param(name, marks=pytest.mark.long) for name in ("model", "eagle3", "medusa"))]
)
def test_sampled_trees_under_traversal_have_the_target_distribution(target, name: str) -> None:
    head = tiny.dflash_head(target, block_size=4, feature_layers=(0, 1))
    drafters: dict[str, Callable[[], Drafter]] = {
        "dflash": lambda: DFlash(head, PAIRS, draft_vocab=[0, 1, 2, 4]),
        "model": lambda: DraftModel(tiny.model(VOCAB, seed=2), PAIRS),
        "eagle3": lambda: Eagle3(tiny.eagle_head(target, draft_vocab=VOCAB - 1, feature_layers=(0, 1)), PAIRS),
        "medusa": lambda: Medusa(tiny.medusa_heads(target, heads=2), PAIRS),
    }
    (done,) = draw(make(target, drafters[name](), "traversal"), SAMPLES, CONTROLS["restricted"])
    assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the samples must span several rounds"
    assert abs(deviation(done, expected_probs("restricted"))) < 5


@pytest.mark.long
def test_distribution_with_draft_probabilities_before_the_correction_differs(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the rule gets the probabilities of the block, from which the tokens were not drawn."""
    original = dspark.expand_corrected

    def uncorrected(tree: Tree, view: Any, vocabulary: Any, logits: Any, *rest: Any) -> Any:
        draft = original(tree, view, vocabulary, logits, *rest)
        probs = draft.probs.at[:, :-1].set(jax.nn.softmax(logits[0], axis=-1))
        return draft.replace(probs=probs)

    monkeypatch.setattr(dspark, "expand_corrected", uncorrected)
    engine = make(target, BLOCKS["dspark"](target, Tree.chain(3)), "rejection")
    (done,) = draw(engine, SAMPLES, CONTROLS["plain"])
    assert deviation(done, expected_probs("plain")) > 20


@pytest.mark.long
def test_distribution_with_draft_probabilities_that_leave_room_for_padding_differs(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the draft probabilities of the common ids add up to 0.6, the rest is padding's."""
    original = draft_model.expand_tree

    def with_padding(*args: Any) -> Any:
        expanded, state = original(*args)
        return expanded.replace(draft=expanded.draft.replace(probs=0.6 * expanded.draft.probs)), state

    monkeypatch.setattr(draft_model, "expand_tree", with_padding)
    (done,) = draw(
        make(target, DraftModel(tiny.model(VOCAB + 2, seed=2), Tree.chain(3)), "rejection"), SAMPLES, CONTROLS["plain"]
    )
    assert deviation(done, expected_probs("plain")) > 20


@pytest.mark.slow
def test_distribution_comparison_with_noise_shared_at_a_position_fails(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: drafting, acceptance and resampling use equal noise at a position."""
    original = sampler.keys

    def by_position(seed, purpose, *place):
        return original(seed, sampler.Purpose.TOKEN, sum(place[1:], start=place[0]))

    monkeypatch.setattr(sampler, "keys", by_position)
    engine = make(target, DraftModel(tiny.model(VOCAB, seed=2), Tree.chain(3)), "rejection")
    (done,) = draw(engine, SAMPLES, CONTROLS["plain"])
    assert deviation(done, decoder.joint_probs(target, PROMPT, TOKENS, temperature=1.0)) > 20
