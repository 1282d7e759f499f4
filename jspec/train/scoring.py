"""Log-probabilities of given tokens with the bits that a deterministic engine samples from, and their gradient.

A trainer whose log-probabilities are the engine's has no mismatch between rollouts and updates, and needs no importance
sampling for it. The values come from the engine's deterministic kernels, for every row of a batch the same bits. These
kernels have no gradients, so the gradient is that of the same computation in plain operations (`Numerics` "reference"),
which computes its activations again, as rematerialisation does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.numerics import REFERENCE, Numerics
from jspec.models.decoder import Model, forward
from jspec.models.deterministic import check_deterministic
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.sampling.logprobs import of_rows
from jspec.train.observe import blocks_of
from jspec.train.rows import ALIGN, Rows, ahead, behind

DETERMINISTIC = Numerics("auto", deterministic=True)
OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}  # as deterministic engines are compiled


def log_probs(
    model: Model,
    tokens: Int[Array, "rows size"],
    lengths: Int[Array, "rows"] | None = None,
    *,
    temperature: float = 1.0,
) -> Float[Array, "rows size"]:
    """Return the log-probability of each token after the tokens before it, as a deterministic engine computes it.

    The values are those of ``Completion.logprobs`` of an engine with ``deterministic=True`` and of this model, bit for
    bit, whatever it drafts, on devices of one kind. Weights are float32 or bfloat16. The values have a gradient with
    respect to the model.

    In a program of the caller's own, such as a jitted loss, XLA may leave out roundings to bfloat16, and then the bits
    differ. So compile it with ``jax.jit(loss, compiler_options=jspec.train.OPTIONS)``; without these options the values
    and gradients of a model in bfloat16 or float16 are NaN. Outside of a program they are computed with the options. A
    model with longrope must have the config that the engine has for its ``max_len`` (`ModelConfig.for_length`).

    Args:
        model: an unquantised model on one device, or on a mesh of one.
        tokens: token ids, rows padded behind with any ids.
        lengths: number of tokens of each row; None: all.
        temperature: number above 0 by which the logits are divided, as an engine with
            ``logprobs_mode="processed_logprobs"`` divides them for a request of this temperature.

    Returns:
        float32 values; 0 for each row's first token and for padding.

    Raises:
        ValueError: the model is quantised or divided over devices, or a product has no deterministic kernel.
        NotImplementedError: a layer keeps a recurrent state.
    """
    if model.mesh is not None and model.mesh.size > 1:
        raise ValueError(f"log_probs: expected a model on one device, got one over {model.mesh}; load it without mesh")
    if not all(layer.mixer.has_pages for layer in model.config.layers):
        raise NotImplementedError("log_probs: expected a target of attention layers, got one with recurrent states")
    check_deterministic(model, "auto")
    if jnp.ndim(tokens) != 2 or 0 in jnp.shape(tokens) or not jnp.issubdtype(jnp.asarray(tokens).dtype, jnp.integer):
        raise ValueError(
            f"log_probs: tokens: expected ids [rows, size], at least one, got {jnp.asarray(tokens).dtype} of shape "
            f"{jnp.shape(tokens)}"
        )
    if lengths is not None and jnp.shape(lengths) != jnp.shape(tokens)[:1]:
        raise ValueError(f"log_probs: lengths: expected one a row, {len(tokens)}, got shape {jnp.shape(lengths)}")
    tokens = jnp.asarray(tokens, jnp.int32)
    size = tokens.shape[1]
    counts = jnp.full(len(tokens), size) if lengths is None else jnp.asarray(lengths)
    padded = jnp.pad(tokens, ((0, 0), (0, -size % ALIGN)))
    segments = (jnp.arange(padded.shape[1]) < counts[:, None]).astype(jnp.int32)
    rows = Rows(tokens=padded, segments=segments, counted=segments > 0)
    whole = model.replace(mesh=None)  # type: ignore[attr-defined]
    return _log_probs(whole, rows, jnp.float32(temperature))[:, :size]


@jax.custom_vjp
def _log_probs(model: Model, rows: Rows, temperature: Float[Array, ""]) -> Float[Array, "rows size"]:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((model, rows))):
        return _computed(model, rows, temperature, DETERMINISTIC) * _one_if_rounded(model.dtype)
    return _compiled(model, rows, temperature)


def _forward(model: Model, rows: Rows, temperature: Array) -> tuple[Array, tuple[Model, Rows, Array]]:
    return _log_probs(model, rows, temperature), (model, rows, temperature)


def _backward(kept: tuple[Model, Rows, Array], gradient: Array) -> tuple[Model, None, None]:
    model, rows, temperature = kept
    _, pull = jax.vjp(lambda weights: _computed(weights, rows, temperature, REFERENCE), model)
    return pull(gradient * _one_if_rounded(model.dtype))[0], None, None


_log_probs.defvjp(_forward, _backward)


def _one_if_rounded(dtype: Any) -> Float[Array, ""]:
    """Return 1, or NaN if the program that is compiled around may leave out roundings to the dtype."""
    if dtype == jnp.float32:
        return jnp.ones(())
    little = float(jnp.finfo(dtype).eps) / 4
    one, part, more = jax.lax.optimization_barrier(
        (jnp.ones((), dtype), jnp.asarray(little, dtype), jnp.full((), 1 + little, jnp.float32))
    )
    sums = (one + part).astype(jnp.float32)  # XLA for CPUs adds in float32
    rounded = more.astype(dtype).astype(jnp.float32)  # XLA for GPUs leaves out both conversions
    return jnp.where((sums == 1) & (rounded == 1), 1.0, jnp.nan)


def _computed(model: Model, rows: Rows, temperature: Float[Array, ""], numerics: Numerics) -> Float[Array, "rows size"]:
    batch = blocks_of(rows, numerics)
    pages, dtype = batch.tokens.shape[0] + 1, str(model.dtype)
    pool = PoolShape(1, pages, ALIGN, rows.tokens.shape[1], dtype, dtype)
    state = create(model.config.layers, pool, dtype)
    last = (model.config.num_layers + 1,)
    out, _ = forward(model, state, batch, feature_layers=last, with_logits=False)
    assert out.features is not None
    normed = out.features.reshape(-1, out.features.shape[-1])
    chosen = of_rows(
        normed,
        ahead(rows.tokens, 1).reshape(-1),
        lambda block: model.logits_of(block, numerics) * (1 / temperature),  # as `jspec.sampling.sampler.process`
        numerics,
    ).chosen
    follows = jnp.where(rows.reaches(1), chosen.reshape(rows.tokens.shape), 0.0)
    return behind(follows, 1)


_compiled = jax.jit(partial(_computed, numerics=DETERMINISTIC), compiler_options=OPTIONS)
