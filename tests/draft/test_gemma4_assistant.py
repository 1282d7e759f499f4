"""Compare drafting with assistants of Gemma 4 with recordings of transformers, and test their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models

import jspec
from jspec import Engine, Gemma4Assistant, Model, NGram, SamplingParams, Tree
from jspec.__main__ import main
from jspec.core.numerics import REFERENCE
from jspec.core.records import PromptBatch, SlotView
from jspec.core.tree import DEFAULT_TREE
from jspec.draft import gemma4_assistant
from jspec.draft.auto import load_drafter
from jspec.draft.beside import Beside
from jspec.draft.choice import DrafterChoice, choose_drafter
from jspec.draft.expand_tree import EXCLUDED
from jspec.draft.gemma4_assistant_head import AssistantHead, ClusterHead
from jspec.models.decoder import forward
from jspec.models.kv_cache import create
from jspec.models.parts.devices import mesh_over
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.quantize import quantize_weights
from jspec.server import run
from jspec.tools import generate
from jspec.tools.command_line import make_parser
from jspec.tools.info import inspect_pair
from jspec.tools.replay import Replay, observe
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Quantized
from tests.support import block_rounds, engines, folders, tiny
from tests.support.arrays import on_device
from tests.support.recordings import TOLERANCE, recording
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FAMILIES = {"e2b": "gemma4_e2b", "26b_a4b": "gemma4_26b_a4b"}  # the first has clusters and layers that share keys
LEAST = 1e-3  # a wrong reading moves some logit by more
ROWS, PAGE = 128, 16
CHAIN, STATIC, DYNAMIC = Tree.chain(4), Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]), Tree.topk(9, 3, 3)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
# Prompts are cut into pieces of at most 16 tokens, and three requests need more pages than there are.
OPTIONS: dict[str, Any] = dict(slots=3, max_len=136, buckets=(3,), prefill_buckets=(16,), page_size=8, controls=False)
PAGES = 24


def folder_of(name: str) -> Path:
    return GOLDEN / "gemma4_assistant" / name


@cache
def target(name: str) -> Model:
    return tiny.load_target(GOLDEN / "families" / FAMILIES[name])


def drafter(name: str, tree: Tree | str = CHAIN) -> Gemma4Assistant:
    return Gemma4Assistant.from_pretrained(folder_of(name), tree=tree, dtype="float32")


def texts(name: str) -> list[tuple[list[int], list[int]]]:
    """Return the recorded prompts, each with the target's greedy tokens after it."""
    data = recording(GOLDEN / "families" / FAMILIES[name] / "expect.npz")
    return [(data[f"prompt{i}"].tolist(), data[f"greedy{i}"].tolist()) for i in range(3)]


def prompts(name: str) -> list[list[int]]:
    return [prompt for prompt, _ in texts(name)]


# ---- against transformers, without an engine


@jax.jit
def prefilled(model: Model, tokens: Any) -> tuple[Any, Any]:
    """Return the caches of a text of `ROWS` tokens, and its states after the final norm."""
    shape = PoolShape(1, ROWS // PAGE, PAGE, ROWS, "float32", "float32")
    batch = PromptBatch.whole(
        on_device([ROWS]),
        tokens=tokens[None],
        positions=on_device(np.arange(ROWS))[None],
        valid=on_device(np.ones((1, ROWS), bool)),
        first_row=on_device(np.zeros(1, int)),
        page_table=on_device(np.arange(ROWS // PAGE))[None],
        bits=None,
        numerics=REFERENCE,
    )
    layers = model.config.layers
    states = (len(layers) + 1,)
    out, caches = forward(model, create(layers, shape, "float32"), batch, feature_layers=states, with_logits=False)
    return caches, out.features


@cache
def caches_of(name: str, prompt: int) -> tuple[Any, Any]:
    text = [token for part in texts(name)[prompt] for token in part]
    return prefilled(target(name), on_device(np.resize(text, ROWS), jnp.int32))


def view_at(name: str, prompt: int, length: int) -> SlotView:
    """Return the view of a round in which a text's first tokens are committed, and the next one is the root."""
    text = [token for part in texts(name)[prompt] for token in part]
    view = view_of_rows([text[length]], length=length, page_size=PAGE)
    pages = on_device(np.arange(ROWS // PAGE))[None]
    return replace(view, page_table=pages, target=caches_of(name, prompt)[0])


@partial(jax.jit, static_argnums=0)
def step(position: int, head: AssistantHead, view: SlotView, tokens: Any, states: Any) -> tuple[Any, Any]:
    assert view.target is not None and position == gemma4_assistant.POSITION
    logits, states = head.run(view.target, gemma4_assistant.batch_of(view, tokens), states)
    return reduce_partials(logits, jnp.float32)[0, 0], states


def computed(head: AssistantHead, name: str, prompt: int, length: int, path: list[int]) -> np.ndarray:
    """Return the logits after a root and after each token of a path but the last [path, vocab], by token id."""
    view, rows = view_at(name, prompt, length), []
    tokens, states = view.root[:, None], caches_of(name, prompt)[1][:, length - 1 : length]
    ids = np.arange(head.config.vocab_size) if head.clusters is None else np.asarray(head.clusters.ids)
    for token in path:
        logits, states = step(gemma4_assistant.POSITION, head, view, tokens, states)
        rows.append(np.asarray(logits)[np.argsort(ids)])
        tokens = on_device([[token]], jnp.int32)
    return np.stack(rows)


def error(head: AssistantHead, name: str, cases: tuple[tuple[int, int], ...] = ((0, 0), (1, 1), (2, 2))) -> float:
    """Return the largest difference from the recorded logits, for each (prompt, index of a recorded round).

    transformers gives tokens that are no candidates one logit, below that of any candidate.
    """
    data, errors = recording(folder_of(name) / "expect.npz"), []
    for prompt, index in cases:
        right, after = data[f"logits{prompt}"][index], (0, 7, 19)[index]
        length = len(texts(name)[prompt][0]) + after
        logits = computed(head, name, prompt, length, data[f"drafts{prompt}"][after].tolist())
        if head.clusters is not None:
            right = np.where(right == right.min(-1, keepdims=True), EXCLUDED, right)
        errors.append(np.abs(logits - right).max())
    return float(max(errors))


@pytest.mark.parametrize("name", FAMILIES)
def test_assistant_has_the_logits_of_transformers(name: str) -> None:
    every = tuple((prompt, index) for prompt in range(3) for index in range(3))
    assert error(drafter(name).bind(target(name)), name, every) < TOLERANCE


def with_window(head: AssistantHead, window: int) -> AssistantHead:
    layers = tuple(
        replace(layer, mixer=replace(layer.gqa, window=layer.gqa.window and window)) for layer in head.config.layers
    )
    return head.replace(config=replace(head.config, layers=layers))


WRONG: dict[str, Callable[[AssistantHead], AssistantHead]] = {
    "keys of an earlier layer": lambda head: head.replace(sources=(0, 0, 0, 2)),
    "no factor of the embedding": lambda head: head.replace(embed_scale=1.0),
    "state before the embedding": lambda head: head.replace(fc=jnp.roll(head.fc, head.config.target_hidden_size, 1)),
    "next state without the norm": lambda head: head.replace(project=head.project / head.norm),
    "a window of one token more": lambda head: with_window(head, 17),
    "clusters in the order of ids": lambda head: head.replace(
        clusters=head.clusters.replace(ids=jnp.arange(head.config.vocab_size))
    ),
}


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_reading_differs_from_transformers(reading: str) -> None:
    assert error(WRONG[reading](drafter("e2b").bind(target("e2b"))), "e2b") > LEAST


@pytest.mark.parametrize("name", FAMILIES)
def test_position_of_transformers_own_generator_is_one_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that position the drafts are those of its generator; at that of the last committed row few are."""
    right, assistant = recording(folder_of(name) / "expect.npz")["generator"], drafter(name)
    head = assistant.bind(target(name))
    lengths = range(4, 4 + len(right))  # texts within the window, of which that generator sees one row more

    def drafts() -> np.ndarray:
        draft = jax.jit(lambda *args: assistant.draft(*args)[0].tokens)
        state = gemma4_assistant.NewestState
        states = caches_of(name, 0)[1][0]
        rows = [draft(head, state(states[n - 1 : n]), view_at(name, 0, n))[0, 1:] for n in lengths]
        return np.array(rows)

    assert (drafts() != right).any(axis=1).mean() > 0.3
    assert error(head, name) < TOLERANCE
    monkeypatch.setattr(gemma4_assistant, "POSITION", 0)
    np.testing.assert_array_equal(drafts(), right)
    assert error(head, name) > LEAST


@pytest.mark.parametrize(("batch", "nodes", "copies"), [(1, 5, True), (2, 2, True), (4, 2, False), (2, 3, False)])
def test_output_head_of_clusters_copies_rows_only_if_they_are_fewer_than_all(
    batch: int, nodes: int, copies: bool
) -> None:
    """Three of 16 clusters for each node."""
    rng, size = np.random.default_rng(batch), 8
    normed, centroids, rows = (rng.normal(size=(*n, 12)).astype(np.float32) for n in ((batch, nodes), (16,), (128,)))
    head = ClusterHead(*map(on_device, (centroids, rows, rng.permutation(128))))
    view = view_of_rows([0] * batch)
    tokens = gemma4_assistant.batch_of(view, on_device(np.zeros((batch, nodes), np.int32)))
    run = jax.jit(lambda x: head.logits(x, 3, tokens))
    best = np.argsort(normed @ centroids.T, axis=-1)[..., -3:]
    is_best = (np.arange(128) // size == best[..., None]).any(axis=2)
    right = np.where(is_best, np.einsum("bth,vh->btv", normed, rows), np.float32(EXCLUDED))
    np.testing.assert_allclose(run(on_device(normed))[0], right, rtol=1e-5, atol=1e-5)
    assert (" gather[" in str(jax.make_jaxpr(run)(normed))) == copies


@pytest.mark.parametrize("tree", [CHAIN, STATIC], ids=str)
def test_window_of_one_token_sees_the_newest_committed_row_alone(tree: Tree) -> None:
    """All earlier rows are on another page. Without its values drafts stay as they are, not so with one row of it."""
    length, changes = PAGE + 1, []
    state, view = gemma4_assistant.NewestState(caches_of("e2b", 0)[1][0, PAGE:length]), view_at("e2b", 0, length)

    def scores(assistant: Gemma4Assistant, view: SlotView) -> Any:
        return assistant.draft(assistant.bind(target("e2b")), state, view)[0].scores

    without = replace(view, target=jax.tree.map(lambda pool: pool.at[0].set(0), view.target))
    for window in (1, 2):
        assistant = drafter("e2b", tree).with_window(window)
        draft = jax.jit(partial(scores, assistant))
        changes.append(np.abs(draft(view) - draft(without)).max())
    assert changes[0] == 0 and changes[1] > LEAST
    assert Beside(drafter("e2b", CHAIN).with_window(1), NGram(CHAIN)).draft_window == 1
    for wrong in (0, True):
        with pytest.raises(ValueError, match=rf"draft_window: expected None or an int >= 1, got {wrong}"):
            drafter("e2b", tree).with_window(wrong)


@pytest.mark.parametrize("tree", [STATIC, DYNAMIC], ids=str)
def test_nodes_of_a_tree_have_the_scores_of_their_paths_drafted_alone(tree: Tree) -> None:
    assistant, length = drafter("e2b", tree), 14
    head, states = assistant.bind(target("e2b")), caches_of("e2b", 0)[1][0, length - 1 : length]
    draft = jax.jit(assistant.draft)(head, gemma4_assistant.NewestState(states), view_at("e2b", 0, length))[0]
    tokens, parents, scores = (np.asarray(field[0]) for field in (draft.tokens, draft.parents, draft.scores))
    for node in range(1, tree.nodes):
        path, at = [], node
        while at > 0:
            path, at = [int(tokens[at]), *path], int(parents[at])
        logits = computed(head, "e2b", 0, length, path)
        log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        assert abs(scores[node] - log_probs[range(len(path)), path].sum()) < TOLERANCE


# ---- in an engine


def check_recorded_drafts(engine: Engine, name: str, times: int = 1) -> int:
    """Decode the recorded prompts, and compare outputs and the drafts of every round; return the number of rounds."""
    data, rounds = recording(folder_of(name) / "expect.npz"), 0
    for index, done in enumerate(engine.generate(prompts(name) * times, GREEDY, trace=True)):
        prompt, right = texts(name)[index % 3]
        assert done.raise_for_error().token_ids == right[: GREEDY.max_tokens]
        for traced, text in block_rounds.texts(done, prompt):
            drafts = data[f"drafts{index % 3}"][len(text) - 1 - len(prompt)]
            assert traced.tokens[1:].tolist() == drafts[: len(traced.tokens) - 1].tolist()
            rounds += 1
    return rounds


@pytest.mark.parametrize("name", FAMILIES)
def test_every_round_of_preempted_requests_with_prefix_hits_drafts_as_transformers(name: str) -> None:
    with engines.make(target(name), drafter=drafter(name), pages=PAGES, **OPTIONS) as engine:
        assert check_recorded_drafts(engine, name, times=3) > 60
        assert engine.metrics.num_preemptions > 0 and engine.metrics.mean_acceptance_length > 1.4
        (again,) = engine.generate(prompts(name)[2:], GREEDY)
        assert again.metrics.num_cached_tokens > 80
        check_recorded_drafts(engine, name)
        engine.core.scheduler.pages.check()


def test_two_devices_with_one_key_value_head_draft_as_transformers() -> None:
    with engines.make(target("e2b"), drafter=drafter("e2b"), tensor_parallel=2, **OPTIONS) as engine:
        assert check_recorded_drafts(engine, "e2b") > 20


def test_two_devices_that_divide_key_value_heads_draft_as_one() -> None:
    """Experts of 26B-A4B in the recording cannot be divided; this target has heads of the same sizes."""
    dense, drafts = tiny.load_target(GOLDEN / "families/gemma4_text"), []
    for devices in (1, 2):
        options = {**OPTIONS, "tensor_parallel": devices}
        with engines.make(dense, drafter=drafter("26b_a4b", DYNAMIC), **options) as engine:
            done = engine.generate(prompts("26b_a4b"), GREEDY, trace=True)
        drafts.append([[traced.tokens.tolist() for traced in output.rounds or ()] for output in done])
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 20


ACCEPT = ("coupled", "rejection", "traversal", "block", "multi_candidate")
CASES = [("e2b", "coupled", DYNAMIC), ("26b_a4b", "rejection", STATIC)]
CASES += [
    pytest.param(name, accept, tree, marks=pytest.mark.long)
    for name in FAMILIES
    for accept in ACCEPT
    for tree in (CHAIN, STATIC, DYNAMIC)
    if (name, accept, tree) not in CASES and (accept != "block" or tree.is_chain)
]


@pytest.mark.parametrize(("name", "accept", "tree"), CASES, ids=str)
def test_outputs_are_those_of_plain_decoding(name: str, accept: str, tree: Tree) -> None:
    """Under rules that draw other tokens than plain decoding, greedy outputs are compared alone."""
    temperatures = (0.0, 1.0) if accept == "coupled" else (0.0,)
    options: dict[str, Any] = dict(make_engine=engines.make, accept=accept, max_tokens=24, temperatures=temperatures)
    assert not jspec.testing.check_lossless(drafter(name, tree), target(name), prompts(name), **OPTIONS, **options)[0.0]


def test_outputs_of_a_quantised_target_are_those_of_plain_decoding() -> None:
    """The assistant reads float8 keys and values, of which its float32 queries see what the target's see."""
    quantised, outputs = quantize_weights(target("e2b"), "int8"), []
    for assistant in (None, drafter("e2b", DYNAMIC)):
        with engines.make(quantised, drafter=assistant, kv_dtype="float8_e4m3fn", **OPTIONS) as engine:
            outputs.append([done.raise_for_error().token_ids for done in engine.generate(prompts("e2b"), GREEDY)])
    plain = [right[: GREEDY.max_tokens] for _, right in texts("e2b")]
    assert outputs[0] == outputs[1] != plain, "control: rounding shows"
    assert engine.metrics.mean_acceptance_length > 1.3


def test_look_up_beside_an_assistant_leaves_outputs_as_they_are() -> None:
    """A node of the look-up below one of the assistant has no state of the assistant."""
    both = Beside(drafter("e2b"), NGram(Tree.chain(3), min_n=1), "beside")
    with engines.make(target("e2b"), drafter=both, **{**OPTIONS, "max_len": 168}) as engine:
        done = engine.generate(prompts("e2b"), SamplingParams(max_tokens=64, temperature=0))
    assert [output.raise_for_error().token_ids for output in done] == [right for _, right in texts("e2b")]
    assert min(engine.metrics.num_accepted_tokens_per_source.values()) > 0


def test_woken_engine_and_one_with_other_weights_draft_as_transformers() -> None:
    """The target's embedding, which the assistant reads, is bound anew with the weights."""
    other = jax.tree.map(lambda weight: 1.1 * weight, target("e2b"))
    with engines.make(other, drafter=drafter("e2b"), pages=PAGES, **OPTIONS) as engine:
        (before,) = engine.generate(prompts("e2b")[:1], GREEDY)
        assert before.token_ids != texts("e2b")[0][1][: GREEDY.max_tokens], "control"
        engine.update_weights(target("e2b"))
        assert check_recorded_drafts(engine, "e2b") > 20
        engine.sleep()
        engine.wake_up()
        assert check_recorded_drafts(engine, "e2b") > 20


@pytest.mark.parametrize("name", FAMILIES)
def test_replay_over_a_text_is_right_where_transformers_drafts_are(name: str) -> None:
    """`jspec info --check` measures a head so."""
    data, (prompt, after) = recording(folder_of(name) / "expect.npz"), texts(name)[0]
    states = (len(target(name).config.layers) + 1,)
    seen = observe(target(name), np.array([[*prompt, *after]], np.int32), states)
    rounds = Replay(drafter(name), target(name))(seen, layers=states, start=[len(prompt)], stepwise=[True])
    right = np.array([data["drafts0"][index, 0] == after[index + 1] for index in range(24)])
    assert rounds.positions[:24, 0].tolist() == [len(prompt) + index for index in range(24)]
    np.testing.assert_array_equal(rounds.hits[:24, 0], right)
    assert 0.2 < right.mean() < 1


# ---- files


def folder_with_tokenizer(path: Path) -> Path:
    """Copy the target's folder, and write a tokenizer whose tokens are the characters of ASCII."""
    shutil.copytree(GOLDEN / "families" / FAMILIES["e2b"], path)
    made = Tokenizer(models.BPE({chr(token): token for token in range(128)}, []))
    made.decoder = decoders.Fuse()
    made.save(str(path / "tokenizer.json"))
    return path


def test_assistant_is_found_and_loaded_by_its_path(tmp_path: Path) -> None:
    beside = folder_with_tokenizer(tmp_path / "target") / "drafter"
    shutil.copytree(folder_of("e2b"), beside)
    choice = choose_drafter(tmp_path / "target")
    assert choice == DrafterChoice("gemma4_assistant", beside) and str(choice) == f"--gemma4-assistant {beside}"
    assert main(["convert", str(beside), str(tmp_path / "converted")]) == 0
    original, converted = (load_drafter(path, dtype="float32") for path in (beside, tmp_path / "converted"))
    assert isinstance(original, Gemma4Assistant) and isinstance(converted, Gemma4Assistant)
    jax.tree.map(np.testing.assert_array_equal, converted.head, original.head)
    for flags in (["--gemma4-assistant", str(beside)], ["--draft", "auto"]):
        arguments = make_parser().parse_args(["generate", "--target", str(tmp_path / "target"), *flags, "text"])
        generate.prepare(arguments)
        made = generate.make_drafter(arguments)
        assert isinstance(made, Gemma4Assistant) and made.tree == DEFAULT_TREE


def test_server_starts_with_an_assistant_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters: list[Any] = []

    def serve(engine: Engine, *_: Any) -> int:
        drafters.append(engine.core.runner.program.drafter)
        return 0

    monkeypatch.setattr(run, "serve", serve)
    words = ["--target", str(folder_with_tokenizer(tmp_path / "target")), "--port", "0", "--max-len", "64"]
    assert main(["serve", *words, "--gemma4-assistant", str(folder_of("e2b")), "--slots", "1"]) == 0
    assert isinstance(drafters[0], Gemma4Assistant)


@pytest.mark.parametrize("kind", ["int8", "fp8_dynamic", "int4"])
def test_quantised_assistant_has_nearly_the_logits_of_transformers(kind: str) -> None:
    """Output heads of clusters stay as they are."""
    for name in FAMILIES:
        head = Gemma4Assistant.from_pretrained(folder_of(name), dtype="float32", quantize=kind).bind(target(name))
        assert all(isinstance(weight, Quantized) for weight in (head.fc, head.layers[0].qkv, head.layers[0].down))
        assert isinstance(head.head, Quantized) == (name == "26b_a4b")
    assert LEAST < error(head, "26b_a4b", ((1, 1),)) < 5


def test_description_says_whether_an_assistant_fits_a_target() -> None:
    folders_of = [folder_of("e2b"), GOLDEN / "families/gemma4_e2b"]
    text, fits = inspect_pair(folders_of[:1], folders_of[1])
    assert fits and "fits: keys and values: of the target's layers 1, 2" in text
    assert "output head: own, 16 clusters, of which 3 have logits (24 tokens)" in text
    text, fits = inspect_pair([folder_of("26b_a4b")], folders_of[1])
    assert (
        not fits and "mismatch: keys and values of the target's last layer with a window: the target has 1 he" in text
    )


def test_assistant_of_another_target_is_refused() -> None:
    for other, message in (
        (target("26b_a4b"), "keys and values of the target's last layer with a window: the target has 2 heads of 16"),
        (tiny.model(128), "target hidden size: the target needs 16, the head has 32"),
        (tiny.model(128, hidden=32), "keys and values of the target's last layer with a window: the target has none"),
    ):
        with pytest.raises(ValueError, match=f"^Gemma4Assistant: {message}.*; use a head made for this target"):
            drafter("e2b").bind(other)
    with pytest.raises(ValueError, match="needs 25 children of a node, the head has 24 candidates; take a narrower"):
        Gemma4Assistant(drafter("e2b").head, Tree.topk(30, 2, 25))


def test_drafter_on_other_devices_may_not_read_the_targets_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = drafter("e2b")
    monkeypatch.setattr(Gemma4Assistant, "mesh", mesh_over("device", jax.devices()[1]))
    with pytest.raises(
        ValueError, match="Gemma4Assistant: device: expected none, as it reads the target's caches, got"
    ):
        Engine(target("e2b"), drafter=assistant, **OPTIONS)


def shared(config: dict[str, Any], **changes: Any) -> None:
    config["text_config"] |= changes


FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
    "layers of another family": (lambda c, t: shared(c, model_type="llama"), "model_type: expected 'gemma4_text' or"),
    "layers with keys": (
        lambda c, t: shared(c, num_kv_shared_layers=2),
        "num_kv_shared_layers: expected 4, the number",
    ),
    "experts": (lambda c, t: shared(c, enable_moe_block=True), "enable_moe_block: expected False, got True"),
    "no width of the target": (lambda c, t: c.pop("backbone_hidden_size"), "backbone_hidden_size"),
    "clusters of unequal sizes": (lambda c, t: c.update(num_centroids=15), "num_centroids: expected a divisor of voc"),
    "more clusters than there are": (
        lambda c, t: c.update(centroid_intermediate_top_k=17),
        "centroid_intermediate_top_k: expected 1 to 16, the number of clusters, got 17",
    ),
    "no order of tokens": (
        lambda c, t: t.pop("masked_embedding.token_ordering"),
        "masked_embedding.token_ordering: expected the order of tokens",
    ),
    "an id twice": (
        lambda c, t: t.update({"masked_embedding.token_ordering": np.zeros(128, np.int64)}),
        r"expected each of the ids 0\.\.127 once, got 128 values of dtype int64, 1 different",
    ),
    "clusters that the config does not name": (
        lambda c, t: c.update(use_ordered_embeddings=False),
        "unknown: masked_embedding.centroids.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_file_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    damage, message = FAULTS[fault]
    config = json.loads((folder_of("e2b") / "config.json").read_text())
    tensors = load_file(folder_of("e2b") / "model.safetensors")
    damage(config, tensors)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        Gemma4Assistant.from_pretrained(folders.write(tmp_path, config, tensors))


def test_file_with_the_output_head_twice_and_unread_keys_is_read(tmp_path: Path) -> None:
    tensors = load_file(folder_of("26b_a4b") / "model.safetensors")
    unread = {
        "self_attn.k_proj.weight": (32, 16),
        "self_attn.v_proj.weight": (32, 16),
        "self_attn.k_norm.weight": (16,),
    }
    more = {f"model.layers.0.{name}": np.zeros(shape, np.float32) for name, shape in unread.items()}
    more |= {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    config = json.loads((folder_of("26b_a4b") / "config.json").read_text())
    assistant = Gemma4Assistant.from_pretrained(folders.write(tmp_path, config, tensors | more), dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, assistant.head, drafter("26b_a4b").head)


@pytest.mark.parametrize("name", FAMILIES)
def test_untied_output_head_is_read_without_the_embedding(name: str, tmp_path: Path) -> None:
    """transformers multiplies by `lm_head` alone, also with clusters."""
    config = json.loads((folder_of(name) / "config.json").read_text()) | {"tie_word_embeddings": False}
    tensors = load_file(folder_of(name) / "model.safetensors")
    embedding = {"model.embed_tokens.weight": np.flip(tensors.pop("model.embed_tokens.weight"), 0).copy()}
    head = {"lm_head.weight": np.flip(embedding["model.embed_tokens.weight"], 0).copy()}
    path = folders.write(tmp_path / "untied", config, tensors | embedding | head)
    assistant = Gemma4Assistant.from_pretrained(path, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, assistant.head, drafter(name).head)
    tied = folders.write(tmp_path / "tied", config | {"tie_word_embeddings": True}, tensors | embedding | head)
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the values of model.embed_tokens.weight"):
        Gemma4Assistant.from_pretrained(tied)
    headless = folders.write(tmp_path / "headless", config, tensors | embedding)
    with pytest.raises(ValueError, match=r"\(missing: lm_head.weight\); check config.json"):
        Gemma4Assistant.from_pretrained(headless)
