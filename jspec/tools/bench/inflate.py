"""A small trained model in a larger shape that computes the same: real text and acceptance at a large model's cost.

Widths are padded with zeros (`padding`), layers that add nothing are inserted, padded tokens are masked.
Where memory bounds a round it takes the time of the larger shape; where arithmetic does, note that a GPU multiplying
zeros draws less power and may clock higher.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from convert import orbax
from convert.orbax import Checkpoint
from jspec.draft import auto
from jspec.draft.eagle_head import EagleHead, EagleLayer
from jspec.draft.head_config import HeadConfig
from jspec.models.config import ModelConfig
from jspec.models.decoder import Layer, Model
from jspec.tools import demo
from jspec.tools.bench import shapes
from jspec.tools.bench.padding import Factor, Growth
from jspec.tools.bench.sizes import DTYPES, NAMES, Plan, Sizes, plan

DEMO = "demo"  # in place of a folder: the embedded pair
FUSING = ("fc", "fc_bias", "fc_norm", "input_norm")  # weights of a head that make its feature

Batches = Iterator[dict[str, Array]]


def pair(
    target: Model,
    sizes: Sizes,
    *,
    head: EagleHead | None = None,
    feature_layers: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> tuple[Model, EagleHead | None]:
    """Inflate a target and its EAGLE-3 head in memory, on the default device.

    Args:
        target: the small model.
        sizes: of what comes back.
        head: made for the target.
        feature_layers: the new target's states that the new head reads, in the order of the old ones; None: 2, N//2
            and N-3 if the old ones are that, else the same.
        dtype: of the new weights, "float32" or "bfloat16"; None: the target's.

    Returns:
        The target, its output head untied: the small one's logits for the small one's tokens, all others far below.
        And the head, if there is one.

    Raises:
        ValueError: with what was expected, what was got, what to do.
    """
    dtype = dtype or str(target.embed.dtype)
    made = plan(target, sizes, head=head, feature_layers=feature_layers, dtype=dtype)
    large = Model.from_weights(made.target.new, _tree(_target_batches(target, made)))
    if head is None or made.head is None:
        return large, None
    return large, EagleHead.from_weights(made.head.new, _tree(_head_batches(head, made.head, made.target)))


def write(
    target: str | Path,
    out: str | Path,
    sizes: Sizes,
    *,
    head: str | Path | None = None,
    head_out: str | Path | None = None,
    feature_layers: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    overwrite: bool = False,
) -> Plan:
    """Inflate into folders as conversion writes them, holding one layer of the large model at a time.

    Args:
        target: a folder or hub id, or "demo"; its tokenizer files go along, and its config.json as it is.
        out: the folder to write.
        head, head_out: likewise for the EAGLE-3 head, both or none.
        feature_layers, dtype: as in `pair`.
        overwrite: replaces converted folders that are there.

    Raises:
        ValueError: as `pair`; like all other errors before anything is written.
        FileExistsError: a folder exists and may not be replaced.
    """
    if (head is None) != (head_out is None) or out == head_out:
        raise ValueError(f"expected HEAD and a HEAD_OUT apart from OUT, got {head} and {head_out}; give both or none")
    for folder in (out, *([] if head_out is None else [head_out])):
        orbax.check_vacant(Path(folder).absolute(), overwrite)
    source = _source(target, demo.TARGET, "target")
    small = Model.from_weights(source.config, source.weights)
    drafts = None if head is None else _source(head, demo.HEAD, "eagle3")
    drafting = None if drafts is None else EagleHead.from_weights(drafts.config, drafts.weights)
    made = plan(small, sizes, head=drafting, feature_layers=feature_layers, dtype=dtype)
    _save(out, source, made.target, _target_batches(small, made), overwrite)
    if head_out is not None and drafts is not None and drafting is not None and made.head is not None:
        _save(head_out, drafts, made.head, _head_batches(drafting, made.head, made.target), overwrite)
    return made


def _source(path: str | Path, embedded: Path, kind: str) -> Checkpoint:
    return auto.load_checkpoint(embedded if path == DEMO else path, dtype="float32", kind=kind)


def _save(out: str | Path, source: Checkpoint, growth: Growth[Any], batches: Batches, overwrite: bool) -> None:
    on_host = ({name: np.asarray(array) for name, array in batch.items()} for batch in batches)
    files = orbax.companions(source.folder)
    orbax.save(out, source.kind, growth.new, on_host, files=files, overwrite=overwrite, compress=True)


def _tree(batches: Batches) -> dict[str, Any]:
    return orbax.unflatten({name: array for batch in batches for name, array in batch.items()})


# ---- weights by name, in batches; one program makes a batch, so that only its results take memory

compiled = partial(jax.jit, static_argnums=0)


def _target_batches(model: Model, made: Plan) -> Batches:
    growth = made.target
    yield _target_embedding(growth, model.embed)
    like = jax.eval_shape(lambda: _layer(growth, model.layers[0]))
    for index, old in enumerate(made.layer_at):
        layer = _inserted(like) if old is None else _layer(growth, model.layers[old])
        yield {f"layers.{index}.{name}": array for name, array in layer.items()}
    yield _target_output(growth, model.norm, model.output_head)


@compiled
def _target_embedding(growth: Growth[ModelConfig], embed: Array) -> dict[str, Array]:
    return {"embed": growth.embedding(embed, Factor(growth.old.vocab_size, growth.new.vocab_size))}


@compiled
def _target_output(growth: Growth[ModelConfig], norm: Array, head: Array) -> dict[str, Array]:
    vocab = Factor(growth.old.vocab_size, growth.new.vocab_size)
    return {"norm": growth.last_norm(norm), "head": growth.output_head(head, vocab)}


@compiled
def _layer(growth: Growth[ModelConfig], layer: Layer) -> dict[str, Array]:
    return growth.block(layer, (growth.hidden,)) | {"attn_norm": growth.norm(layer.attn_norm)}


def _inserted(like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """A layer that adds nothing to the state."""
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in like.items()}


def _head_batches(head: EagleHead, growth: Growth[HeadConfig], target: Growth[ModelConfig]) -> Batches:
    if head.embed is not None:
        yield _head_embedding(growth, head.embed)
    fusing = {name: x for name in FUSING if (x := getattr(head, name)) is not None}
    yield _fusion((growth, target), fusing)
    for index, layer in enumerate(head.layers):
        made = _head_layer((growth, index), layer)
        yield {f"layers.{index}.{name}": array for name, array in made.items()}
    yield _head_output(growth, head.norm, head.head, head.draft_to_target)


@compiled
def _head_embedding(growth: Growth[HeadConfig], embed: Array) -> dict[str, Array]:
    return {"embed": growth.pad(embed, (Factor(growth.old.vocab_size, growth.new.vocab_size),), (growth.hidden,))}


@compiled
def _fusion(how: tuple[Growth[HeadConfig], Growth[ModelConfig]], weights: dict[str, Array]) -> dict[str, Array]:
    """What makes one feature of the target's states; what masks in the first becomes what masks in the feature."""
    (growth, target), many = how, how[0].old.num_features
    states = (Factor(many, many), target.hidden)
    made = {}
    for name in {"input_norm", "fc_norm"} & weights.keys():
        norm = weights[name]
        made[name] = growth.norm(norm, states).reshape(*norm.shape[:-1], -1)
    if "fc_bias" in weights:
        made["fc_bias"] = growth.pad(weights["fc_bias"], (growth.hidden,))
    if "fc" in weights:
        made["fc"] = growth.pad(weights["fc"], (growth.hidden,), states)
        if growth.mask is not None:
            assert target.mask is not None  # padded draft tokens are padded ones of the target
            ratio = growth.mask.constant / target.mask.constant
            made["fc"] = made["fc"].at[growth.mask.channel, target.mask.channel].set(ratio)
    return made


@compiled
def _head_layer(how: tuple[Growth[HeadConfig], int], layer: EagleLayer) -> dict[str, Array]:
    (growth, index), normed = how, how[0].old.qk_norm
    made = growth.block(layer, (Factor(2, 2), growth.hidden) if index == 0 else (growth.hidden,), normed=normed)
    if layer.input_norm is not None:
        made["input_norm"] = growth.norm(layer.input_norm)
    if layer.hidden_norm is not None:
        made["hidden_norm"] = growth.norm(layer.hidden_norm)
    if layer.qkv_bias is not None:
        made["qkv_bias"] = growth.qkv(layer.qkv_bias, normed=normed)
    if layer.q_norm is not None and layer.k_norm is not None:
        made |= growth.head_norms(layer.q_norm, layer.k_norm)
    return made


@compiled
def _head_output(
    growth: Growth[HeadConfig], norm: Array | None, head: Array | None, ids: Array | None
) -> dict[str, Array]:
    """Padded draft tokens stand for padded ones of the target."""
    drafted = Factor(growth.old.draft_vocab_size, growth.new.draft_vocab_size)
    own = jnp.arange(drafted.old) if ids is None else ids
    padded = growth.old.vocab_size + jnp.arange(drafted.new - drafted.old)
    made = {"draft_to_target": jnp.concatenate([own, padded]).astype(jnp.int32)}
    if norm is not None:
        made["norm"] = growth.last_norm(norm)
    if head is not None:
        made["head"] = growth.output_head(head, drafted)
    return made


# ---- the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `jspec bench inflate` takes."""
    parser.add_argument("target", help=f'folder or hub id of a small model; "{DEMO}": the embedded pair\'s target')
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--head", help=f'its EAGLE-3 head, likewise; "{DEMO}": the embedded one')
    parser.add_argument("--head-out", type=Path, help="folder to write the head to")
    parser.add_argument("--shape", choices=sorted(shapes.TARGETS), help="all sizes; those given beside it replace its")
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name.removesuffix('_size').replace('_', '-')}", type=int, dest=field.name)
    parser.add_argument("--feature-layers", type=_ids, metavar="2,16,29", help="states that the written head reads")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--overwrite", action="store_true", help="replace converted folders that are there")
    parser.set_defaults(run=run)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Write the folders and say what they hold."""
    made = write(
        arguments.target,
        arguments.out,
        _sizes(arguments),
        head=arguments.head,
        head_out=arguments.head_out,
        feature_layers=arguments.feature_layers,
        dtype=arguments.dtype,
        overwrite=arguments.overwrite,
    )
    print(f"{arguments.out}: target, {arguments.dtype}, {made.target.new}")
    if made.head is not None:
        print(f"{arguments.head_out}: EAGLE-3 head, {arguments.dtype}, {made.head.new}")
    return 0


def _sizes(arguments: argparse.Namespace) -> Sizes:
    given = {field.name: value for field in fields(Sizes) if (value := getattr(arguments, field.name)) is not None}
    if arguments.shape is not None:
        return replace(Sizes.of(arguments.shape), **given)
    if missing := [name for name in NAMES if name not in given]:
        raise ValueError(
            f"expected --shape or every size, got none for {', '.join(missing)}; give the one or the other"
        )
    return Sizes(**given)
