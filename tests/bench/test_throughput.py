"""`jspec bench throughput`: synthetic acceptance at stated rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.core.config import ACCEPT_RULES, EngineConfig
from jspec.core.records import Draft, SlotState, StepResult, Verdict
from jspec.step.program import Params, Program, init_state
from jspec.tools.bench import random_models, roofline, step, throughput
from jspec.tools.bench.throughput import RATES
from tests.support.arrays import on_device
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once

SHAPE, DTYPE, CONTEXT, TOKENS = "tiny", "float32", 20, 40
TREE, ROWS = Tree.chain(2), 3
STATED = 1 + RATES[0] + RATES[1]


def simulated_lengths(rates: tuple[float, ...], rows: int, tokens: int, trials: int = 400) -> np.ndarray:
    """Return mean acceptance lengths of simulated runs, drawn by the probability of each position given the last."""
    rng = np.random.default_rng(1)
    given = [rate / before for rate, before in zip(rates, (1.0, *rates), strict=False)]
    lengths = []
    for _ in range(trials):
        emitted = count = 0
        for _ in range(rows):
            own = 0
            while own < tokens:
                length = 1
                for probability in given:
                    if rng.random() >= probability:
                        break
                    length += 1
                own, emitted, count = own + length, emitted + length, count + 1
        lengths.append(emitted / count)
    return np.array(lengths)


def is_as_stated(measured: float, rates: tuple[float, ...], rows: int, tokens: int) -> bool:
    """Return whether a mean acceptance length is within 4 standard deviations of simulated runs."""
    lengths = simulated_lengths(rates, rows, tokens)
    return abs(measured - lengths.mean()) < 4 * lengths.std()


class Compiled(NamedTuple):
    """Compiled steps of one case, with imposed acceptance and without, and the state before the first step."""

    case: throughput.ThroughputCase
    params: Params
    fresh: Callable[[], SlotState]
    synthetic: Any
    own: Any


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    point = step.StepCase(SHAPE, ROWS, CONTEXT, TREE, dtype=DTYPE)
    case = throughput.ThroughputCase(point, RATES[:2], TOKENS)
    target, head = random_models.random_target(SHAPE, DTYPE), random_models.random_head(SHAPE, DTYPE)
    program, params, pool = step.build(point, target, head, growth=TOKENS)

    def fresh() -> SlotState:
        return throughput.restart(step.filled_state(init_state(program, params, pool), point), case)

    state = fresh()
    return Compiled(
        case,
        params,
        fresh,
        step.compile_step(program, params, state, ROWS, throughput.synthetic_step, inputs=2),
        step.compile_step(program, params, state, ROWS),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the output and the results of one run of the command, with the floors of an H200."""
    folder = tmp_path_factory.mktemp("throughput")
    words = f"--shape {SHAPE} --dtype {DTYPE} --batch 8 --tree chain:2 --context {CONTEXT} --tokens {TOKENS}".split()
    with pytest.MonkeyPatch.context() as patch, open(folder / "printed.txt", "w") as printed:
        patch.setattr("sys.stdout", printed)
        patch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H200"])
        assert main(["bench", "throughput", *words, "--json", str(folder / "results.json")]) == 0
    return folder


def test_throughput_at_given_acceptance_rates_has_their_acceptance_length(folder: Path) -> None:
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert result["stated_length"] == pytest.approx(STATED) == pytest.approx(2.3)
    assert is_as_stated(result["length"], RATES[:2], rows=8, tokens=TOKENS)
    assert not is_as_stated(1.05, RATES[:2], rows=8, tokens=TOKENS)
    assert not is_as_stated(2.72, RATES[:2], rows=8, tokens=TOKENS)  # another draft's


def test_throughput_results_have_consistent_times_and_token_counts(folder: Path) -> None:
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    seconds = result["rounds"] * result["milliseconds"] / 1e3
    assert result["tokens_per_second"] * seconds == pytest.approx(8 * TOKENS)
    assert result["milliseconds_per_token"] * TOKENS == pytest.approx(seconds * 1e3)
    at_work = result["rounds"] * result["live"]
    assert 8 * TOKENS <= at_work * result["length"] < 8 * (TOKENS + 2)  # the last rounds may be cut
    assert 1 <= result["live"] <= 8 and result["floor"] < result["milliseconds"]


def test_throughput_table_and_json_state_that_acceptance_is_synthetic(folder: Path) -> None:
    about, heading, _, row = (folder / "printed.txt").read_text().splitlines()
    assert "SYNTHETIC acceptance" in about
    values = dict(zip(heading.replace("new tokens", "new_tokens").split(), row.split(), strict=True))
    assert (values["stated"], values["tree"], values["context"]) == ("2.30", "chain:2", str(CONTEXT))
    assert values["new_tokens"] == str(TOKENS)
    content = json.loads((folder / "results.json").read_text())
    assert content["acceptance"].startswith("SYNTHETIC")
    assert values["tokens/s"] == f"{content['results'][0]['tokens_per_second']:.0f}"


def test_throughput_step_grows_caches_by_the_imposed_number_of_tokens(compiled: Compiled) -> None:
    drawn = throughput.draw(RATES[:2], ROWS, TOKENS, seed=3)
    state, slots = compiled.fresh(), on_device(np.arange(ROWS))
    left = np.full(ROWS, TOKENS)
    for accepted in drawn:
        before, active = np.asarray(state.lengths), left > 0
        state, output = compiled.synthetic(compiled.params, state, slots, on_device(accepted))
        expected = np.minimum(accepted + 1, left)
        (seen,) = StepResult.read(np.asarray(output.report)).counts
        assert seen.tolist() == expected.tolist()
        assert (np.asarray(state.lengths) - before)[active].tolist() == expected[active].tolist()
        waiting = np.asarray(state.draft.count)  # pairs that the head has to catch up with
        assert waiting[active].tolist() == expected[active].tolist()
        left = left - expected
    assert not left.any() and not np.asarray(state.active).any()


def test_throughput_step_with_the_true_acceptance_imposed_equals_a_decoding_step(compiled: Compiled) -> None:
    """Guards against a change of `spec_step` that the step of the benchmark lacks."""
    slots, states = on_device(np.arange(ROWS)), [compiled.fresh(), compiled.fresh()]
    for _ in range(3):
        states[0], own = compiled.own(compiled.params, states[0], slots)
        accepted = on_device(StepResult.read(np.asarray(own.report)).accept_len[0])
        states[1], imposed = compiled.synthetic(compiled.params, states[1], slots, accepted)
        assert np.asarray(own.report).tolist() == np.asarray(imposed.report).tolist()
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *states)


def test_throughput_with_ordinary_decoding_step_accepts_almost_no_draft(compiled: Compiled) -> None:
    """Negative control: the ordinary decoding step in place of the step with imposed acceptance."""

    def own_step(params: Params, state: SlotState, slots: Any, accepted: Any) -> Any:
        return compiled.own(params, state, slots)

    drawn = throughput.draw(RATES[:2], ROWS, TOKENS, seed=0)
    results = [
        throughput.run_steps(one, compiled.params, compiled.fresh(), drawn)[2] for one in (compiled.synthetic, own_step)
    ]
    lengths = [float(np.mean(seen.accept_len[seen.counts > 0] + 1)) for seen in results]
    assert [is_as_stated(length, RATES[:2], ROWS, TOKENS) for length in lengths] == [True, False]
    assert lengths[1] < 1.1
    assert results[0].counts.sum() == ROWS * TOKENS > results[1].counts.sum()


def test_imposed_verdict_is_used_only_in_the_throughput_step(compiled: Compiled) -> None:
    assert ["/impose/" in one.as_text() for one in (compiled.synthetic, compiled.own)] == [True, False]


def test_engine_has_no_option_for_synthetic_acceptance() -> None:
    names = [*ACCEPT_RULES, *(field.name for record in (Program, EngineConfig) for field in fields(record))]
    assert not [name for name in names if "synth" in name or "impose" in name]
    with pytest.raises(ValueError, match="accept: expected one of"):
        EngineConfig(accept="synthetic")


def test_imposed_verdict_accepts_the_first_tree_node_at_the_given_depth() -> None:
    """Root 10 has children 11 and 12, which have children 13 and 14; the target's own token is 9."""
    tree, rows = Tree.static([(0,), (1,), (0, 0), (1, 0)]), 5
    within_cap = np.ones((rows, 5), bool)
    within_cap[3, 3:] = False
    draft = Draft(
        tokens=jnp.tile(on_device(np.arange(10, 15)), (rows, 1)),
        parents=jnp.tile(on_device(tree.parents), (rows, 1)),
        scores=on_device(np.zeros((rows, 5))),
        valid=on_device(within_cap),
        probs=None,
        vocab_map=None,
    )
    ones, first = on_device(np.ones(rows, jnp.int32)), on_device(np.arange(3)) == 0
    own = Verdict(
        0 * ones,
        jnp.where(first, 0, -1) + 0 * ones[:, None],
        jnp.where(first, 9, -1) + 0 * ones[:, None],
        ones,
        ones < 0,
    )
    view = view_of_rows([10] * rows)
    view = replace(view, remaining=view.remaining.at[4].set(1))
    impose = jax.jit(throughput.impose, static_argnums=3)
    imposed = impose(own, draft, view, tree, on_device([0, 1, 2, 2, 2]))
    assert imposed.path.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 3], [0, 1, -1], [0, 1, 3]]
    assert imposed.tokens.tolist() == [[9, -1, -1], [11, 9, -1], [11, 13, 9], [11, 9, -1], [11, -1, -1]]
    assert imposed.counts.tolist() == [1, 2, 3, 2, 1]  # the last row has one token left
    assert imposed.ended.tolist() == [False] * 4 + [True]


def test_random_accepted_counts_follow_the_rates_until_every_row_has_its_tokens() -> None:
    drawn = throughput.draw(RATES, 64, 200, seed=0)
    for position, rate in enumerate(RATES):
        assert np.mean(drawn > position) == pytest.approx(rate, abs=4 * (rate * (1 - rate) / drawn.size) ** 0.5)
    assert ((drawn + 1).sum(0) >= 200).all() and ((drawn[:-1] + 1).sum(0) < 200).any()
    assert (drawn == throughput.draw(RATES, 64, 200, seed=0)).all()
    assert throughput.draw((), 2, 5, seed=0).tolist() == [[0, 0]] * 5  # plain decoding


def test_acceptance_rates_have_the_stated_mean_length() -> None:
    rates_of = throughput.rates_of
    assert [1 + sum(RATES[:k]) for k in range(5)] == pytest.approx([1, 1.75, 2.30, 2.72, 3.03])
    assert rates_of(None, RATES) == ()
    assert rates_of(Tree.static([(0,), (1,), (0, 0)]), RATES) == RATES[:2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tree chain:2 --positions .5", "expected 2 for chain:2, got 1"),
        ("--tree chain:2 --positions .5,.6", "never rise"),
        ("--tree chain:2 --positions 1.5,.6", "from 0 to 1"),
        ("--tree topk:6,2,2", "expected no tree, a chain or a static one"),
    ],
)
def test_throughput_command_with_a_wrong_option_prints_one_line_before_measuring(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "throughput", "--shape", SHAPE, *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("jspec: ") and error.count("\n") == 1
