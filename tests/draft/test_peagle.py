"""Compare P-EAGLE heads with the formulas and with SpecForge's code, and test their files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, Engine, Model, PEagle, SamplingParams, Tree
from jspec.draft import auto
from jspec.draft.eagle import write_pending_rows
from jspec.draft.formats.eagle_formats import read_head
from jspec.tools import info
from jspec.tools.convert import main
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.reference import head as reference
from tests.support import block_rounds, folders, tiny
from tests.support.folders import DRAFT_IDS, assert_same, block_shapes, loaded, without
from tests.support.recordings import TOLERANCE, recording
from tests.support.views import prefilled

pytestmark = pytest.mark.once

MASK, WINDOW = 39, 6
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER: dict[str, Any] = {
    **folders.TARGET,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
CONFIG: dict[str, Any] = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 10,
    "norm_before_residual": True,
    "fc_norm": True,
    "norm_output": False,
    "mask_token_id": MASK,
    IDS: [0, 2],
}
PROMPT = np.random.default_rng(4).integers(0, 39, 4 * WINDOW).tolist()
LONGER = [*PROMPT, 5, 6]  # its first pages are those of the prompt
TREES = {"chain": Tree.chain(5), "tree": Tree.topk(12, 4, 3)}


def tensors_of() -> dict[str, np.ndarray]:
    """Return random tensors of a head of two layers as speculators saves it; weights are scaled by their inputs."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (40, 16), "fc.weight": (16, 32), "norm.weight": (16,)}
    shapes |= {f"fc_norm.{i}.weight": (16,) for i in range(2)} | {"lm_head.weight": (10, 16), "mask_hidden": (1, 1, 32)}
    shapes |= {f"layers.{name}.weight": (16,) for name in ("0.input_layernorm", "0.hidden_norm", "1.input_layernorm")}
    shapes |= block_shapes("layers.0", LAYER, 32) | block_shapes("layers.1", LAYER, 16)
    drawn = folders.random_tensors(shapes)
    scaled = {n: t * 1.5 / np.sqrt(t.shape[-1]) if t.ndim == 2 else np.abs(t) + 0.5 for n, t in drawn.items()}
    scaled |= {"mask_hidden": 2 * drawn["mask_hidden"], "embed_tokens.weight": drawn["embed_tokens.weight"]}
    return {n: t.astype(np.float32) for n, t in scaled.items()} | folders.vocabulary(DRAFT_IDS)


@cache
def target() -> Model:
    return tiny.model(40, layers=3)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> PEagle:
    return PEagle.from_pretrained(folders.write(tmp_path_factory.mktemp("peagle"), CONFIG, tensors_of()))


# ---- drafts


def completions(drafter: PEagle | None, tree: Tree, page_size: int) -> list[Completion]:
    """Decode the prompt, and then the longer one, whose first pages are in the prefix cache."""
    options: dict[str, Any] = dict(slots=1, max_len=64, page_size=page_size, prefill_buckets=(8,), buckets=(1,))
    with Engine(target(), drafter=drafter and PEagle(drafter.head, tree), **options) as engine:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        found = [engine.generate(prompt, params, trace=True)[0] for prompt in (PROMPT, LONGER)]
    assert found[1].metrics.num_cached_tokens >= len(PROMPT) - page_size
    return found


def oracle(own: Completion, prompt: list[int], depth: int, **changes: Any) -> Callable[[list[int]], np.ndarray]:
    """Return a function of a text, the beginning of prompt and completion, that returns the logits after it.

    Args:
        changes: other values of the config, the tensors and the mask token.
    """
    config = {**LAYER, "norm_before_residual": True} | changes.get("config", {})
    tensors, mask = tensors_of() | changes.get("tensors", {}), changes.get("mask", MASK)
    states = block_rounds.states_of(target(), [*prompt, *own.token_ids], (0, 2))
    return lambda text: reference.peagle(config, tensors, text[1:], states[: len(text) - 1], depth, mask)


CONTROLS: dict[str, dict[str, Any]] = {
    "a window of one token more": {"config": {"sliding_window": WINDOW + 1}},
    "a window of one token less": {"config": {"sliding_window": WINDOW - 1}},
    "another mask token": {"mask": MASK - 1},
    "no mask feature": {"tensors": {"mask_hidden": np.zeros((1, 1, 32), np.float32)}},
    "raw first residual": {"config": {"norm_before_residual": False}},
}


@cache
def plain_completions() -> list[Completion]:
    return completions(None, TREES["chain"], page_size=8)


@pytest.mark.parametrize(("tree", "page_size"), [("chain", 1), ("tree", 8)])
def test_engine_with_a_peagle_head_emits_plain_tokens_and_drafts_by_the_formulas(
    drafter: PEagle, tree: str, page_size: int
) -> None:
    """The texts are longer than the window. With each control, scores of drafted nodes differ."""
    depth, plain = TREES[tree].depth, plain_completions()
    found = completions(drafter, TREES[tree], page_size)
    assert [own.token_ids for own in found] == [own.token_ids for own in plain]
    for own, prompt in zip(found, (PROMPT, LONGER), strict=True):
        right = oracle(own, prompt, depth)
        assert np.abs(block_rounds.score_differences(own, prompt, right, DRAFT_IDS)).max() < 2e-3
        for one, text in block_rounds.texts(own, prompt) if tree == "chain" else []:
            assert one.tokens[1:].tolist() == DRAFT_IDS[right(text).argmax(-1)].tolist()
    for name, changes in CONTROLS.items():
        others = block_rounds.score_differences(own, prompt, oracle(own, prompt, depth, **changes), DRAFT_IDS)
        assert np.median(np.abs(others)) > 0.005, name


def computed(drafter: PEagle, tokens: np.ndarray, features: np.ndarray, depth: int) -> np.ndarray:
    """Compute a head's logits after a text of a token and ``tokens``, the last of which is the root."""
    model, before = tiny.model(40, layers=8, hidden=drafter.head.config.target_hidden_size), [0, *tokens[:-1]]
    params, state, view = prefilled(drafter, model, features, root=int(tokens[-1]), tokens=np.array(before))
    _, product, _ = write_pending_rows(params, state, view, masks=depth - 1)
    return np.asarray(reduce_partials(product, jnp.float32)[0])


@pytest.mark.parametrize("exporter", ["specforge", "speculators"])
def test_block_of_a_recorded_peagle_head_is_that_of_its_exporter(golden: Path, exporter: str) -> None:
    """SpecForge's head has its own hidden size and no mask token in its config.json; speculators' has a window."""
    recorded, folder = recording(golden / f"peagle/{exporter}/block5.npz"), golden / f"peagle/{exporter}/draft"
    text, right = (recorded["tokens"], recorded["features"], 5), recorded["block_logits"]
    own = PEagle.from_pretrained(folder, mask_token_id=MASK).head.config
    assert own.source_format == exporter and own.windows == ([7] if exporter == "speculators" else [])
    found = computed(PEagle.from_pretrained(folder, mask_token_id=MASK), *text)
    np.testing.assert_allclose(found, right, atol=TOLERANCE)
    assert (found.argmax(-1) == right.argmax(-1)).all()
    other = computed(PEagle.from_pretrained(folder, mask_token_id=MASK - 1), *text)
    np.testing.assert_allclose(other[0], right[0], atol=TOLERANCE)
    assert (np.abs(other - right)[1:].max(-1) > 50 * TOLERANCE).all(), "the mask token is in all rows but the first"


# ---- files


def layouts() -> dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return one head's config.json and tensors as each exporter writes them."""
    tensors, flat = tensors_of(), {**without(CONFIG, "speculators_model_type", "transformer_layer_config"), **LAYER}
    named = {f"model.{name}" if name.partition(".")[0] in MODEL else name: t for name, t in tensors.items()}
    training = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "target_hidden_size": 16}
    parallel = {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, **training}
    first = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    first["mask_hidden"] = tensors["mask_hidden"][0]
    vllm = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK}
    return {
        "speculators": (CONFIG, tensors),
        "specforge": (flat, tensors),
        "automodel": ({**flat, **parallel}, named),
        "specforge, names of vLLM": ({**without(flat, "mask_token_id"), **vllm}, first),
    }


MODEL = ("embed_tokens", "fc", "fc_norm", "layers", "norm")
LAYOUTS = ("speculators", "specforge", "automodel", "specforge, names of vLLM")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peagle_head_in_the_layout_of_every_exporter_loads_equal_tensors(tmp_path: Path, layout: str) -> None:
    (config, tensors), expected = layouts()[layout], loaded(folders.write(tmp_path / "own", CONFIG, tensors_of()))
    folder = folders.write(tmp_path / "other", config, tensors)
    assert_same(loaded(folder), expected)
    assert expected["mask_hidden"].shape == (32,)
    ours, theirs = (auto.plan(f).config.to_json() for f in (folder, tmp_path / "own"))
    assert ours.pop("source_format") == layout.partition(",")[0] and ours["method"] == "peagle"
    assert {**ours, "source_format": "speculators"} == theirs


def test_converted_peagle_head_has_the_same_config_and_is_recognised(tmp_path: Path, golden: Path) -> None:
    arguments = [str(golden / "peagle/specforge/draft"), str(tmp_path / "converted"), "--mask-token-id", str(MASK)]
    assert main(arguments) == 0
    found, own = auto.load_drafter(tmp_path / "converted"), PEagle.from_pretrained(arguments[0], mask_token_id=MASK)
    assert isinstance(found, PEagle) and found.head.config == own.head.config
    assert found.head.config.mask_token_id == MASK and found.tree == Tree.chain(5)


def test_peagle_config_with_norm_output_of_any_exporter_needs_no_answer_because_nothing_is_fed_back() -> None:
    for layout in ("speculators", "specforge"):
        config = read_head({**layouts()[layout][0], "norm_output": True}, "peagle")
        assert not config.norm_output


@pytest.mark.parametrize(
    ("changes", "tensors", "error", "named"),
    [
        ({"mask_token_id": None}, {}, ValueError, r"mask_token_id: expected mask_token_id or .*pass mask_token_id="),
        ({"pard_token": 3}, {}, ValueError, r"expected one value, got \[39, 3\] in config.json; pass mask_token_id="),
        ({"mask_token_id": 40}, {}, ValueError, r"mask_token_id: expected an id below vocab_size \(40\), got 40"),
        ({"parallel_draft_step": 4}, {}, NotImplementedError, "parallel_draft_step: expected 1, got 4"),
        ({}, {"mask_hidden": np.zeros((4, 1, 32))}, NotImplementedError, r"mask_hidden: expected one vector of 32 .*4"),
        ({}, {"mask_hidden": np.zeros((1, 1, 16))}, ValueError, r"mask_hidden \(expected \(1, 1, 32\), got \(1, 1, 16"),
        ({}, {"mask_hidden": None}, ValueError, "missing: mask_hidden"),
        ({}, {"layers.1.input_layernorm.weight": None}, ValueError, r"missing: layers\.1\.input_layernorm\.weight"),
    ],
    ids=str,
)
def test_peagle_head_with_an_unsupported_or_wrong_value_raises_naming_it(
    tmp_path: Path, changes: dict[str, Any], tensors: dict[str, Any], error: type[Exception], named: str
) -> None:
    given = {name: tensor for name, tensor in (tensors_of() | tensors).items() if tensor is not None}
    with pytest.raises(error, match=named):
        auto.plan(folders.write(tmp_path, {**CONFIG, **changes}, given))


def test_info_of_a_peagle_head_names_format_flags_mask_token_and_windows(tmp_path: Path) -> None:
    folder = folders.write(tmp_path, CONFIG, tensors_of())
    text = info.describe(folder)
    for part in (
        "model: P-EAGLE head (speculators format), hidden 16, target hidden 16",
        "flags beside plain P-EAGLE: norm_before_residual, fc_norm, 2 layers",
        f"block: any number of tokens in one pass, mask token {MASK}",
        "features: target states 0, 2",
        f"window: {WINDOW} tokens in 1 of 2 layers; none in 1 of 2 layers",
    ):
        assert part in text
