"""Small models with random weights, and small real models, loaded once per process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from convert.orbax import unflatten
from jspec.core.prefill_input import PrefillInput, PromptPiece
from jspec.core.sampling import Sampling
from jspec.draft import auto
from jspec.draft.dflash2_head import DFlash2Head
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.dspark_head import DSparkHead
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.formats.dflash_format import head_params as block_params
from jspec.draft.gemma4_assistant_head import AssistantConfig, AssistantHead, assistant_params
from jspec.draft.head_config import METHODS, DFlash2Config, DFlashConfig, DSparkConfig, HeadConfig
from jspec.draft.medusa import MedusaConfig, MedusaHeads, medusa_params
from jspec.models import load
from jspec.models.adapter_files import AdapterFile, ModuleAdapter
from jspec.models.adapters import adaptable_weights
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.decoder import Model
from jspec.models.families.gemma4_layers import queries_only
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.shared_kv import TargetKV
from jspec.models.parts.param_spec import Params, ParamSpec
from jspec.models.parts.rope import Rope
from jspec.models.weights.params import model_params, random_weights
from jspec.tools import check_head
from tests.support.arrays import on_device


def config(vocab: int, *, layers: int = 2, hidden: int = 16, **flags: Any) -> ModelConfig:
    return ModelConfig.of_sizes(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
        norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=False,
        max_position=4096,
        **flags,
    )


def model(
    vocab: int, *, seed: int = 0, layers: int = 2, hidden: int = 16, sharpness: float = 1.0, **flags: Any
) -> Model:
    """Return a random decoder; a larger sharpness makes its distributions more peaked.

    Args:
        flags: `qkv_bias` and `qk_norm` of all layers.
    """
    return random_model(config(vocab, layers=layers, hidden=hidden, **flags), seed=seed, sharpness=sharpness)


def random_model(c: ModelConfig, *, seed: int = 0, sharpness: float = 1.0) -> Model:
    """Return a random decoder with a given config."""
    rng = np.random.default_rng(seed)
    gains, params = {"qkv": 2.0, "embed": 4.0, "head": sharpness}, model_params(c)
    weights = {}
    for name in sorted(params, key=layers_first):
        kind, spec = name.rpartition(".")[2], params[name]
        is_norm = spec.init == "ones"
        values = rng.uniform(0.5, 1.5, spec.shape) if is_norm else _normal(rng, spec, gains.get(kind, 1.0))
        weights[name] = values.astype(np.float32)
    return Model.from_weights(c, tree_of(weights))


def hybrid(vocab: int, *, seed: int = 0) -> Model:
    """Return a random decoder with a gated delta net, whose decays halve a state in about ten tokens, and attention."""
    c = config(vocab)
    delta = GatedDelta(key_heads=1, value_heads=2, key_dim=8, value_dim=8, taps=4)
    c = replace(c, layers=(replace(c.layers[0], mixer=delta), c.layers[1]))
    weights = random_weights(model_params(c), "float32", seed)
    weights["layers"][0]["dt_bias"] -= 3.6
    return Model.from_weights(c, weights)


def tree_of(weights: dict[str, np.ndarray]) -> Any:
    """Return the tree of named weights as jax arrays."""
    return unflatten({name: on_device(values) for name, values in weights.items()})


# Values are drawn in this order; tests depend on the weights that a seed gives.
ORDER = (
    *("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down", "embed", "norm", "head"),
    *("qkv_bias", "q_norm", "k_norm", "o_bias", "attn_post_norm", "mlp_post_norm", "sinks", "q_up", "k_up", "v_up"),
    *("router", "router_bias", "router_correction", "experts_gate_up", "experts_gate_up_bias"),
    *("experts_down", "experts_down_bias", "output_scale", "shared_gate", "experts_in", "experts_out"),
)


def layers_first(name: str) -> tuple[bool, int, int]:
    """Return a sort key that puts layers in order before the other parameters."""
    prefix, _, kind = name.rpartition(".")
    return not prefix, int(prefix.rpartition(".")[2] or 0), ORDER.index(kind)


def _normal(rng: np.random.Generator, spec: ParamSpec, gain: float = 1.0) -> np.ndarray:
    return rng.normal(0, gain / np.sqrt(spec.shape[-1]), spec.shape)


def _draw(rng: np.random.Generator, params: Params, *names: str) -> dict[str, np.ndarray]:
    """Draw normal values for the named parameters in this order, and set all norms to 1."""
    return {name: _normal(rng, params[name]).astype(np.float32) for name in names} | {
        name: np.ones(spec.shape, np.float32) for name, spec in params.items() if spec.init == "ones"
    }


HEAD_LAYER = tuple(f"layers.0.{name}" for name in ("qkv", "o", "gate_up", "down"))


def eagle_head(
    target: Model, *, draft_vocab: int, feature_layers: tuple[int, ...], seed: int = 1, **config: Any
) -> EagleHead:
    """Return a random EAGLE-3 head for a target, with a vocabulary map of scattered, ascending ids.

    Args:
        config: further fields of its config.
    """
    rng = np.random.default_rng(seed)
    c = head_config(target, draft_vocab=draft_vocab, feature_layers=feature_layers).resized(**config)
    params = head_params(c)
    later = [name.replace("layers.0", f"layers.{index}") for index in range(1, c.num_layers) for name in HEAD_LAYER]
    weights = _draw(rng, params, *HEAD_LAYER, *later)
    ids = np.sort(rng.choice(c.vocab_size, draft_vocab, replace=False)).astype(np.int32)
    weights |= _draw(rng, params, "fc", "head") | {"draft_to_target": ids}
    return EagleHead.from_weights(c, tree_of(weights))


def peagle_head(
    target: Model, *, draft_vocab: int, feature_layers: tuple[int, ...], layers: int = 2, seed: int = 1
) -> EagleHead:
    """Return a random P-EAGLE head of several layers, with the target's embedding and a map of scattered ids."""
    rng = np.random.default_rng(seed)
    c = head_config(target, draft_vocab=draft_vocab, feature_layers=feature_layers, method="peagle", num_layers=layers)
    params = head_params(c)
    weights = _draw(rng, params, *(name for name, spec in params.items() if spec.init == "normal"))
    ids = np.sort(rng.choice(c.vocab_size, draft_vocab, replace=False)).astype(np.int32)
    weights |= {"draft_to_target": ids, "mask_hidden": 5 * weights["mask_hidden"]}
    return EagleHead.from_weights(c, tree_of(weights))


def eagle1_head(target: Model, *, seed: int = 1) -> EagleHead:
    """Return a random EAGLE-1 head, which uses the target's final norm output, vocabulary and output head."""
    rng = np.random.default_rng(seed)
    c = head_config(target, draft_vocab=target.config.vocab_size, feature_layers=None, method="eagle")
    weights = _draw(rng, head_params(c), "fc")
    weights["fc_bias"] = rng.normal(0, 0.1, c.hidden_size).astype(np.float32)
    return EagleHead.from_weights(c, tree_of(weights | _draw(rng, head_params(c), *HEAD_LAYER)))


def mtp_head(target: Model, *, seed: int = 1) -> EagleHead:
    """Return a random MTP layer, which uses the target's final norm output, vocabulary and output head."""
    c = head_config(target, draft_vocab=target.config.vocab_size, feature_layers=None, method="mtp")
    return EagleHead.from_weights(c, tree_of(_draw(np.random.default_rng(seed), head_params(c), "fc", *HEAD_LAYER)))


def dflash_head(
    target: Model, *, block_size: int, feature_layers: tuple[int, ...], layers: int = 2, seed: int = 1
) -> DFlashHead:
    """Return a random DFlash head, whose mask token is the last id of the vocabulary."""
    c = block_config(DFlashConfig, target, block_size=block_size, feature_layers=feature_layers, num_layers=layers)
    return DFlashHead.from_weights(c, tree_of(_block_weights(c, seed)))


def dspark_head(
    target: Model, *, block_size: int, feature_layers: tuple[int, ...], markov: str = "vanilla", seed: int = 1
) -> DSparkHead:
    """Return a random DSpark head with 4 Markov channels, whose corrections are as large as the logits."""
    fields: dict[str, Any] = dict(block_size=block_size, feature_layers=feature_layers, num_layers=2)
    c = block_config(DSparkConfig, target, **fields, markov_rank=4, markov_head_type=markov)
    weights = _block_weights(c, seed)
    weights["markov.embed"] *= 6
    return DSparkHead.from_weights(c, tree_of(weights))


def dflash2_head(
    target: Model, *, block_size: int, feature_layers: tuple[int, ...], candidates: int = 9, seed: int = 1
) -> DFlash2Head:
    """Return a random DFlash2 head, whose selector and convolutions change as much as the rest."""
    fields: dict[str, Any] = dict(block_size=block_size, feature_layers=feature_layers, num_layers=2)
    c = block_config(DFlash2Config, target, **fields, selector_rank=4, selector_top_k=candidates)
    c = replace(c, layers=tuple(replace(layer, block_taps=2, block_group=4) for layer in c.layers))
    weights = _block_weights(c, seed)
    weights["selector.predecessor"] *= 6
    return DFlash2Head.from_weights(c, tree_of(weights))


def _sizes(target: Model) -> dict[str, Any]:
    """Return the values that configs of all heads for a target have in common."""
    own = target.config
    same = "vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim"
    sizes = {name: getattr(own, name) for name in same.split()}
    return sizes | dict(target_hidden_size=own.hidden_size, norm_eps=1e-5, rope=Rope(), source_format="random")


def block_config(record: type[DFlashConfig], target: Model, **fields: Any) -> Any:
    """Return the config of a head for blocks, whose mask token is the last id of the vocabulary."""
    own = target.config
    return record.of_sizes(
        **_sizes(target),
        draft_vocab_size=own.vocab_size,
        qk_norm="head",
        mask_token_id=own.vocab_size - 1,
        **fields,
    )


def _block_weights(c: DFlashConfig, seed: int) -> dict[str, np.ndarray]:
    """Draw the weights of a head for blocks, biases too."""
    params = block_params(c)
    names = [name for name, spec in params.items() if spec.init != "ones"]
    return _draw(np.random.default_rng(seed), params, *names)


def medusa_heads(target: Model, heads: int, *, seed: int = 1) -> MedusaHeads:
    """Return random Medusa heads of one residual block each."""
    rng, own = np.random.default_rng(seed), target.config
    c = MedusaConfig(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, num_heads=heads, num_layers=1, source_format="random"
    )
    params = medusa_params(c)
    drawn = _draw(rng, params, "heads.0.blocks.0.weight", *(f"heads.{head}.output" for head in range(heads)))
    weights = {}
    for name, spec in params.items():
        if spec.init == "zeros":
            weights[name] = np.zeros(spec.shape, np.float32)
        else:  # all heads share the block of the first head
            weights[name] = drawn.get(name, drawn["heads.0.blocks.0.weight"])
    return MedusaHeads.from_weights(c, tree_of(weights))


def assistant_head(target: Model, *, clusters: int = 0, top_clusters: int = 0, seed: int = 1) -> AssistantHead:
    """Return a random assistant of two layers for a target without windows; clusters have scattered ids."""
    of_target, rng = target.config, np.random.default_rng(seed)
    mixer = replace(of_target.layers[-1].gqa, qk_norm="head")
    layer = replace(of_target.layers[-1], mixer=queries_only(TargetKV, mixer, of_window=False))
    c = AssistantConfig(
        vocab_size=of_target.vocab_size,
        hidden_size=12,
        layers=(layer, layer),
        norm_eps=1e-5,
        target_hidden_size=of_target.hidden_size,
        clusters=clusters,
        top_clusters=top_clusters,
    )
    params = assistant_params(c)
    weights = _draw(rng, params, *(name for name, spec in params.items() if spec.init == "normal"))
    if clusters:
        weights["clusters.ids"] = rng.permutation(of_target.vocab_size).astype(np.int32)
    return AssistantHead.from_weights(c, tree_of(weights))


def uno_adapter(target: Model, *, rank: int = 2, seed: int = 1) -> AdapterFile:
    """Return a random adapter of all weights that may have one."""
    rng, modules = np.random.default_rng(seed), {}
    for weight in (weight for layer in adaptable_weights(target.config) for weight in layer.values()):
        for name, rows in weight.modules.items():
            shapes = (rank, weight.spec.shape[1]), (rows, rank)
            a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
            modules[name] = ModuleAdapter(a / np.sqrt(a.shape[1]), b / 2)
    return AdapterFile(modules, rank, digest=bytes([seed]))


def head_config(
    target: Model,
    *,
    draft_vocab: int,
    feature_layers: tuple[int, ...] | None,
    method: str = "eagle3",
    num_layers: int = 1,
) -> HeadConfig:
    """Return the config of a head for a target; the mask token of P-EAGLE is the last id of the vocabulary."""
    own = target.config
    return METHODS[method].of_sizes(
        **_sizes(target),
        draft_vocab_size=draft_vocab,
        feature_layers=feature_layers,
        fc_bias=method == "eagle",
        num_layers=num_layers,
        **({"mask_token_id": own.vocab_size - 1} if method == "peagle" else {}),
    )


@cache
def load_target(folder: Path) -> Model:
    checkpoint = load.load(folder, dtype="float32")
    return Model.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_head(folder: Path) -> EagleHead:
    """Load an EAGLE-1 or EAGLE-3 head."""
    checkpoint = auto.load_checkpoint(folder, dtype="float32")
    return EagleHead.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_medusa(folder: Path) -> MedusaHeads:
    checkpoint = auto.load_checkpoint(folder, dtype="float32", kind="medusa")
    return MedusaHeads.from_weights(checkpoint.config, checkpoint.weights)


def prompt_piece(count: int, *, page_row: Sequence[int] | np.ndarray, slot: int = 0, **fields: Any) -> PromptPiece:
    """Return a whole prompt of ``count`` tokens as one greedy piece.

    Args:
        page_row: the slot's row of the page table.
        fields: other fields of `PromptPiece` and of its `Sampling`.
    """
    piece = PromptPiece(
        slot=np.int32(slot),
        start=np.int32(0),
        count=np.int32(count),
        last=np.int32(1),
        write=np.int32(1),
        root=np.int32(-1),
        remaining=np.int32(1000),
        controlled=np.int32(0),
        sampling=Sampling.row(**{name: fields.pop(name) for name in Sampling.fields() if name in fields}),
        page_row=np.asarray(page_row, np.int32),
    )
    return piece._replace(**fields)


def prefill_input(ids: list[int], *, size: int | None = None, slots: int = 1, **fields: Any) -> PrefillInput:
    """Return the input of a prefill step with a whole prompt.

    Args:
        size: number of tokens of the program; None: those of the prompt.
        slots: number of slots.
        fields: arguments of `prompt_piece`.
    """
    return PrefillInput.pack([prompt_piece(len(ids), **fields)], [ids], size or len(ids), slots=slots)


def one_layer(target: Model) -> Model:
    """Return the target cut to its first layer, a draft model whose tokens are often rejected."""
    return target.replace(layers=target.layers[:1], config=target.config.resized(num_layers=1))


def recorded_prompts(golden: Path) -> list[list[int]]:
    """Return the sixteen prompts of the recordings."""
    with np.load(golden / "greedy_ar.npz") as arrays:
        flat, offsets = arrays["prompt"], arrays["prompt_offset"]
    return [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def english() -> str:
    """About 13,000 characters of English and a little Python: files of the project that do not change."""
    return check_head.TEXT + (Path(__file__).parents[2] / "LICENSE").read_text()


def text_cuts(count: int, *, longest: int, seed: int = 0) -> list[str]:
    """Cuts of `english` of different lengths, each at most ``longest`` characters."""
    text = english()
    rng = np.random.default_rng(seed)
    starts, sizes = rng.integers(0, len(text) - longest, count), rng.integers(1, longest + 1, count)
    return [text[a : a + n] for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]


def greedy_cases(folder: Path) -> list[dict]:
    return json.loads((folder / "golden_greedy.json").read_text())["cases"]
