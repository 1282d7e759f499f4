"""Compare a user's logits processor at every node with transformers' processors token by token."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Engine, LogitsContext, NGram, SamplingParams, Tree
from jspec.core.ancestors import ancestors
from jspec.core.config import EngineConfig
from jspec.core.records import Draft
from jspec.draft.base import NoDraft
from jspec.engine.input.input_processor import InputProcessor
from jspec.sampling import logits_processor, penalties
from tests.reference.masking import decoded
from tests.support import byte_pair, engines, lettered
from tests.support.views import draft_of_rows, view_of_rows

pytestmark = pytest.mark.once
NGRAM, PLACE = 2, 6
SEQUENCES = {(3, 5): 2.5, (1,): -1.0, (2, 2, 4): 6.0, (7, 1, 9): -np.inf}


def edit(logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Add sequence biases; ban repeated pairs if args[1] > 0; after `PLACE` tokens add the bias args[0] to token 6."""
    vocab = jnp.arange(logits.shape[-1])
    for sequence, bias in SEQUENCES.items():
        begins = jnp.all(context.newest(len(sequence) - 1) == jnp.asarray(sequence[:-1], jnp.int32), axis=-1)
        logits = logits + jnp.where(begins[..., None] & (vocab == sequence[-1]), bias, 0.0)
    nodes, positions = logits.shape[1], context.text.shape[1] + context.path.shape[2]
    tokens = jnp.pad(context.text, ((0, 0), (0, context.path.shape[2])), constant_values=-1)
    tokens = jnp.broadcast_to(tokens[:, None], (len(tokens), nodes, positions))
    places = context.size[:, None, None] + jnp.arange(context.path.shape[2])
    rows, columns = jnp.arange(len(tokens))[:, None, None], jnp.arange(nodes)[:, None]
    tokens = tokens.at[rows, columns, places].set(context.path)
    is_repeated = (tokens[..., :-1] == context.newest(NGRAM - 1)) & (tokens[..., 1:] >= 0)
    banned = jnp.where(is_repeated & (context.args[:, None, 1:] > 0), tokens[..., 1:], logits.shape[-1])
    logits = logits.at[rows, columns, banned].set(-jnp.inf, mode="drop")
    is_late = context.generated >= PLACE
    return logits + jnp.where(is_late[..., None] & (vocab == 6), context.args[:, None, :1], 0.0)


def by_transformers(
    logits: np.ndarray, prompt: list[int], output: list[int], args: tuple[float, ...] | None
) -> np.ndarray:
    """Edit one row of logits [vocab] as `edit` does, by transformers' own classes."""
    bias, bans_repeats = args or (0.0, 0.0)
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    ids, scores = torch.tensor([[*prompt, *output]]), torch.tensor(logits)[None]
    scores = hf.SequenceBiasLogitsProcessor({key: float(value) for key, value in SEQUENCES.items()})(ids, scores)
    scores = hf.NoRepeatNGramLogitsProcessor(NGRAM)(ids, scores) if bans_repeats else scores
    return scores.numpy()[0] + np.float32(bias) * ((np.arange(len(logits)) == 6) & (len(output) >= PLACE))


ROWS, NODES, DEPTH, WIDTH = 4, 7, 6, 40


@cache
def jitted() -> Any:
    return jax.jit(lambda *a: edited(*a))


def edited(logits: jax.Array, draft: Draft, view: Any) -> jax.Array:
    return penalties.apply_penalties(logits, view, penalties.node_paths(draft, ancestors(draft.parents), DEPTH))


def compare(seed: int, *, chain: bool, run: Any) -> None:
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(n if chain else rng.integers(0, n + 1) for n in range(NODES - 1))]] * ROWS)
    tokens, vocab = rng.integers(0, 5, (ROWS, NODES)), 12
    texts = [rng.integers(0, 12, rng.integers(3, 30)).tolist() for _ in range(ROWS)]
    prompts = [int(rng.integers(1, len(text))) for text in texts]
    tokens[:, 0] = [text[-1] for text in texts]
    rows = np.full((ROWS, WIDTH), 3)  # the columns behind a text hold another text's tokens
    for row, text in enumerate(texts):
        rows[row, : len(text) - 1] = text[:-1]
    args = np.array([[2.0, 1.0], [-3.0, 1.0], [0.0, 0.0], [50.0, 1.0]], np.float32)
    state = penalties.unused(ROWS, vocab, 2).replace(
        prompt_size=jnp.asarray(prompts, jnp.int32), processor_args=jnp.asarray(args)
    )
    view = view_of_rows([text[-1] for text in texts]).replace(
        lengths=jnp.asarray([len(text) - 1 for text in texts], jnp.int32),
        controls=state,
        token_history=jnp.asarray(rows, jnp.int32),
        processor=edit,
    )
    draft = draft_of_rows(tokens, parents)
    logits = rng.normal(0, 3, (ROWS, NODES, vocab)).astype(np.float32)
    found = np.asarray(run(jnp.asarray(logits), draft, view))
    for row, text in enumerate(texts):
        for node in range(NODES):
            path, at = [], node
            while at > 0:
                path.append(int(tokens[row, at]))
                at = int(parents[row, at])
            output = [*text[prompts[row] :], *path[::-1]]
            expected = by_transformers(logits[row, node], text[: prompts[row]], output, tuple(args[row]))
            np.testing.assert_allclose(found[row, node], expected, atol=1e-5)


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_logits_processor_on_random_trees_equals_transformers_at_every_node(chain: bool) -> None:
    for seed in range(6):
        compare(seed, chain=chain, run=jitted())


@pytest.mark.parametrize("fault", ["ancestors", "root", "generated"])
def test_logits_processor_with_a_wrong_context_differs_from_transformers(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: ancestors, root or the number of generated tokens are wrong in the context."""
    right = logits_processor.LogitsContext

    def wrong(**fields: Any) -> LogitsContext:
        if fault == "ancestors":
            fields["path"] = jnp.full_like(fields["path"], -1)
        elif fault == "root":
            fields["size"] = fields["size"] - 1
        else:
            fields["prompt_size"] = fields["prompt_size"] + 1
        return right(**fields)

    monkeypatch.setattr(logits_processor, "LogitsContext", wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(0, chain=False, run=jax.jit(lambda *a: edited(*a)))


@cache
def engine(tree: Tree, **options: Any) -> Engine:
    return Engine(
        engines.target(),
        drafter=NGram(tree),
        slots=3,
        max_len=engines.MAX_LEN,
        page_size=4,
        pages=22,
        buckets=(3,),
        prefill_buckets=(6,),
        rounds_per_dispatch=2,
        tokenizer=lettered.tokenizer(),
        eos_ids=(lettered.END,),
        logits_processor=edit,
        processor_args=2,
        **options,
    )


PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 6, 7, 8, 9, 10, 11] * 2, [5, 1, 5, 1, 5], [7]]
WORD = "[abc1,]{3,40}(é)?"
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, processor_args=(9.0, 0.0)),
    SamplingParams(seed=1, max_tokens=20, repetition_penalty=1.1, processor_args=(-2.0, 1.0), stop_token_ids=(9,)),
    SamplingParams(seed=2, max_tokens=16, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=16, regex=WORD, processor_args=[3.0, 1.0]),
]


def decode_by_transformers(prompt: list[int], params: SamplingParams) -> list[int]:
    """Decode one token at a time with transformers' processors."""
    return decoded(prompt, params, edit=partial(by_transformers, args=params.processor_args))


@cache
def expected() -> list[list[int]]:
    return [decode_by_transformers(*each) for each in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(Tree.chain(3), id="chain"),
        pytest.param(Tree.static([(0,), (1,), (0, 0), (1, 0)]), id="tree", marks=pytest.mark.long),
    ],
)
def test_engine_with_logits_processor_emits_tokens_of_transformers_decoding(tree: Tree) -> None:
    """In the second run prompts are in the prefix cache; the processor must still see their tokens."""
    pytest.importorskip("outlines_core")
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        done = engine(tree).generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
        assert [one.raise_for_error().token_ids for one in done] == [expected()[i] for i in order]
    metrics = engine(tree).metrics
    assert metrics.num_accepted_tokens > 0 and metrics.num_cached_tokens > 0


def test_request_whose_logits_processor_bans_all_allowed_tokens_ends_with_error() -> None:
    """The grammar allows two letters, and the processor bans each pair of letters that occurred before."""
    pytest.importorskip("outlines_core")
    one = engine(Tree.chain(3))
    done = one.generate(
        PROMPTS[3:], SamplingParams(temperature=0, max_tokens=40, regex="((c1)+,){30}", processor_args=(0, 1))
    )[0]
    with pytest.raises(ValueError, match="or the engine's logits_processor banned every token that the grammar allows"):
        done.raise_for_error()


BAD = [
    (3, "expected a function"),
    (
        lambda x, context: x + np.asarray(x),
        "expected a function of jax operations on arrays, got TracerArrayConversionError when it was traced",
    ),
    (lambda x, context: x[:, 0], r"expected logits of shape \(2, 1, 16\) and type float32 back, got .*\(2, 16\)"),
    (lambda x, context: x.astype(jnp.bfloat16), "type float32 back, got .*bfloat16"),
    (lambda x, context: None, "back, got None"),
]


@pytest.mark.parametrize(("processor", "message"), BAD)
def test_engine_with_invalid_logits_processor_raises(processor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"logits_processor: .*{message}|logits_processor: {message}"):
        Engine(engines.target(), logits_processor=processor)


def test_request_with_inconsistent_logits_processor_options_raises() -> None:
    tree = NoDraft().tree
    with pytest.raises(ValueError, match="processor_args: expected 0 without a logits_processor, got 2"):
        logits_processor.check(None, EngineConfig(processor_args=2), tree, 16)
    with pytest.raises(ValueError, match="logits_processor: expected controls=True beside it"):
        logits_processor.check(edit, EngineConfig(controls=False), tree, 16)
    with pytest.raises(ValueError, match="processor_args: expected an int from 0 to 2147483647, got -1"):
        EngineConfig(processor_args=-1)
    with pytest.raises(ValueError, match="processor_args: expected a tuple of finite numbers"):
        SamplingParams(processor_args=(float("nan"),))
    with pytest.raises(ValueError, match=r"processor_args: expected 0 numbers, as this engine was built for.*\(1.0,\)"):
        InputProcessor(None, 16, (), EngineConfig()).requests([1], SamplingParams(processor_args=(1.0,)), trace=False)


def test_engine_from_pretrained_with_invalid_logits_processor_raises() -> None:
    processor, message = BAD[0]
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(byte_pair.TARGET, logits_processor=processor)
