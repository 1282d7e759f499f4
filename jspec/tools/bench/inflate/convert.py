"""`jspec bench inflate`: write a small trained target and head in a larger shape, with equal logits.

So a benchmark decodes real text with real acceptance at a large model's cost.

Widths are padded with zeros (`grow`), layers that add nothing are inserted, padded tokens are masked. A step that
memory bounds takes the larger shape's time; one that arithmetic bounds may take less, as a GPU draws less power for
zeros and may clock higher.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from convert import orbax
from convert.orbax import Checkpoint
from jspec.draft import auto
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.tools import demo
from jspec.tools.bench.inflate.grow import Factor, GrowthPlan, Padder, Sizes, plan, sizes_of
from jspec.tools.bench.options import SIZES
from jspec.tools.bench.results import Results

Batches = Iterator[dict[str, Array]]  # weights by name; one batch is in memory at a time


def write(
    target: str | Path,
    out: str | Path,
    sizes: Sizes,
    *,
    head: str | Path | None = None,
    head_out: str | Path | None = None,
    dtype: str,
    overwrite: bool = False,
) -> GrowthPlan:
    """Inflate a target and its head and write their folders; raise all errors before the first file is written.

    Args:
        target: folder or hub id, or "demo"; its tokenizer files and config.json are copied.
        head: folder or hub id of the EAGLE-3 head, or "demo"; None: no head.
        head_out: folder to write the head to; None if there is no head.
        dtype: dtype of the written weights, as for `plan`.
    """
    if (head is None) != (head_out is None) or out == head_out:
        raise ValueError(f"expected HEAD and a HEAD_OUT apart from OUT, got {head} and {head_out}; give both or none")
    for folder in (out, *([] if head_out is None else [head_out])):
        orbax.check_vacant(Path(folder).absolute(), overwrite)
    source = _load(target, demo.TARGET, "target")
    small = Model.from_weights(source.config, source.weights)
    head_source = None if head is None else _load(head, demo.HEAD, "eagle3")
    small_head = None if head_source is None else EagleHead.from_weights(head_source.config, head_source.weights)
    made = plan(small, sizes, head=small_head, feature_layers=None, dtype=dtype)
    _save(out, source, made.target, target_batches(small, made), overwrite)
    if head_out is not None and head_source is not None and small_head is not None and made.head is not None:
        _save(head_out, head_source, made.head, head_batches(small_head, made.head, made.target), overwrite)
    return made


def grow_pair(
    small: Model,
    sizes: Sizes,
    *,
    head: EagleHead | None = None,
    feature_layers: tuple[int, ...] | None = None,
    dtype: str = "float32",
) -> tuple[Model, EagleHead | None]:
    """Inflate a target and its head in memory; the arguments are those of `plan`."""
    made = plan(small, sizes, head=head, feature_layers=feature_layers, dtype=dtype)

    def tree(batches: Batches) -> dict[str, Any]:
        return orbax.unflatten({name: array for batch in batches for name, array in batch.items()})

    large = Model.from_weights(made.target.new, tree(target_batches(small, made)))
    if head is None or made.head is None:
        return large, None
    return large, EagleHead.from_weights(made.head.new, tree(head_batches(head, made.head, made.target)))


def _load(path: str | Path, embedded: Path, kind: str) -> Checkpoint:
    return auto.load_checkpoint(embedded if path == demo.NAME else path, dtype="float32", kind=kind)


def _save(out: str | Path, source: Checkpoint, padder: Padder, batches: Batches, overwrite: bool) -> None:
    on_host = ({name: np.asarray(array) for name, array in batch.items()} for batch in batches)
    files = orbax.companions(source.folder)
    orbax.save(out, source.kind, padder.new, on_host, files=files, overwrite=overwrite, compress=True)


def target_batches(model: Model, made: GrowthPlan) -> Batches:
    """Yield the padded weights of the target by name: embedding, each layer, norm and output head."""
    padder = made.target

    def layer(index: int) -> dict[str, Array]:
        params = model.layers[index]
        assert params.attn_norm is not None
        return padder.block(params, (padder.hidden,)) | {"attn_norm": padder.norm(params.attn_norm)}

    yield {"embed": padder.embedding(model.embed)}
    like = jax.eval_shape(lambda: layer(0))
    for index, old in enumerate(made.layer_at):  # zeros add nothing to the state
        weights = layer(old) if old is not None else {n: jnp.zeros(x.shape, x.dtype) for n, x in like.items()}
        yield {f"layers.{index}.{name}": array for name, array in weights.items()}
    yield {"norm": padder.last_norm(model.norm), "head": padder.output_head(model.output_head, padder.vocab)}


def head_batches(head: EagleHead, padder: Padder, target: Padder) -> Batches:
    """Yield the padded weights of the head by name: embedding if it has one, each layer, and all others."""
    if head.embed is not None:
        yield {"embed": padder.pad(head.embed, (padder.vocab,), (padder.hidden,))}
    for index, layer in enumerate(head.layers):  # the first reads embedding beside feature
        made = padder.block(layer, (padder.hidden,) if layer.hidden_norm is None else (Factor(2, 2), padder.hidden))
        norms = {"input_norm": layer.input_norm, "hidden_norm": layer.hidden_norm}
        made |= {name: padder.norm(norm) for name, norm in norms.items() if norm is not None}
        yield {f"layers.{index}.{name}": array for name, array in made.items()}
    assert head.fc is not None and head.norm is not None and head.head is not None  # `plan` has checked
    states = padder.old.num_features
    fc = padder.pad(head.fc, (padder.hidden,), (Factor(states, states), target.hidden))
    if padder.mask is not None:  # the feature's mask channel is that of the first state
        assert target.mask is not None  # padded draft tokens are padded tokens of the target
        fc = fc.at[padder.mask.channel, target.mask.channel].set(padder.mask.constant / target.mask.constant)
    if head.fc_norm is not None:
        yield {"fc_norm": jax.vmap(target.norm)(head.fc_norm)}
    drafted = Factor(padder.old.draft_vocab_size, padder.new.draft_vocab_size)
    ids = jnp.arange(drafted.old) if head.draft_to_target is None else head.draft_to_target
    padded = padder.old.vocab_size + jnp.arange(drafted.new - drafted.old)  # map to padded tokens of the target
    yield {
        "fc": fc,
        "norm": padder.last_norm(head.norm),
        "head": padder.output_head(head.head, drafted),
        "draft_to_target": jnp.concatenate([ids, padded]).astype(jnp.int32),
    }


def run(arguments: argparse.Namespace) -> Results:
    """Write the inflated target and head to the folders that the command line names."""
    a = arguments
    named = {name: size for name in (*SIZES, "draft_vocab_size") if (size := getattr(a, name)) is not None}
    sizes = ({} if a.shape is None else sizes_of(a.shape)) | named
    if not sizes:
        raise ValueError("expected --shape or a size, such as --hidden-size, got none; name one that shall grow")
    made = write(a.target, a.out, sizes, head=a.head, head_out=a.head_out, dtype=a.dtype, overwrite=a.overwrite)
    written = {a.out: made.target.new} | ({} if made.head is None else {a.head_out: made.head.new})
    texts = {path: ", ".join(f"{name}={getattr(new, name)}" for name in SIZES) for path, new in written.items()}
    return Results("\n".join(f"{path}: {a.dtype}, {text}" for path, text in texts.items()), ())
