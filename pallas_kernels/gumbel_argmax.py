"""One draw from each row's law by Gumbel noise, without writing the noise down or making it for what cannot be drawn.

    argmax_v l[v] / T + g(key, id v)   over l[v] >= bound,      g = -log(-log u)      (argmax l where T is 0)

u is what `jax.random.gumbel(key, [vocab])` takes for a token: threefry-2x32 (Salmon et al., SC 2011) of the key and the
token's id, in JAX's partitionable form, so that a draw can be repeated anywhere by key and token, over another
vocabulary too. Most tokens lie below a bound; a block of them that holds none above it is skipped.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.implementation import Implementation, choose

BLOCK = 1024  # tokens a program reads
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def _threefry(first: Array, second: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 in 20 rounds of the counter (0, low) under the key (first, second)."""
    words = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x, y = jnp.zeros_like(low) + words[0], low + words[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _gumbel(first: Array, second: Array, token: Array) -> Array:
    """The noise of some tokens."""
    x, y = _threefry(first, second, token.astype(jnp.uint32))
    tiny = jnp.finfo(jnp.float32).tiny
    bits = ((x ^ y) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)  # a float from 1 to below 2
    uniform = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32) - 1 + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def _reference(logits, keys, temperature, bound, ids):
    temperature = jnp.repeat(temperature, logits.shape[0] // temperature.shape[0])

    def drawn():
        tokens = jnp.arange(logits.shape[1]) if ids is None else ids
        noise = _gumbel(keys[:, :1], keys[:, 1:], tokens[None])
        tempered = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
        scores = jnp.where(logits >= bound[:, None], tempered + noise, -jnp.inf)
        return jnp.argmax(jnp.where(temperature[:, None] > 0, scores, logits), axis=-1)

    token = jax.lax.cond(jnp.any(temperature > 0), drawn, lambda: jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32)


def _kernel(logits_ref, keys_ref, temperature_ref, bound_ref, *refs, vocab):
    """One program: the best token of a block of a row."""
    *ids_ref, best_ref, token_ref = refs
    row, piece = pl.program_id(0), pl.program_id(1)
    temperature, bound = temperature_ref[row // (bound_ref.shape[0] // temperature_ref.shape[0])], bound_ref[row]
    token = piece * BLOCK + jnp.arange(BLOCK)
    logits = pltriton.load(logits_ref.at[row, token], mask=token < vocab, other=-jnp.inf)
    is_drawn = temperature > 0

    def keep(scores):
        best = jnp.max(scores)
        best_ref[row, piece] = best
        token_ref[row, piece] = jnp.min(jnp.where(scores == best, token, vocab - 1))

    @pl.when(jnp.logical_not(is_drawn))
    def _():
        keep(logits)

    @pl.when(is_drawn & jnp.logical_not(jnp.max(logits) >= bound))  # of a row with NaN too
    def _():
        best_ref[row, piece] = temperature * -jnp.inf
        token_ref[row, piece] = piece * BLOCK

    @pl.when(is_drawn & (jnp.max(logits) >= bound))
    def _():
        own = pltriton.load(ids_ref[0].at[token], mask=token < vocab, other=0) if ids_ref else token
        noise = _gumbel(keys_ref[row, 0], keys_ref[row, 1], own)
        keep(jnp.where(logits >= bound, logits / temperature + noise, -jnp.inf))


def _pallas(logits, keys, temperature, bound, ids, *, interpret):
    rows, vocab = logits.shape
    pieces = pl.cdiv(vocab, BLOCK)
    best, tokens = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab),
        grid=(rows, pieces),
        out_shape=[jax.ShapeDtypeStruct((rows, pieces), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gumbel_argmax",
    )(logits, keys, temperature, bound, *([] if ids is None else [ids]))
    return jnp.take_along_axis(tokens, jnp.argmax(best, axis=1, keepdims=True), axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("implementation",))
def gumbel_argmax(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float[Array, " groups"],
    bound: Float[Array, " rows"],
    ids: Int32[Array, " vocab"] | None = None,
    *,
    implementation: Implementation = "auto",
) -> Int32[Array, " rows"]:
    """Returns one of the `vocab` tokens for each row, the first of equals (arXiv:1611.01144).

    Args:
        logits: float32, not divided by the temperature yet.
        keys: of threefry-2x32, each for one draw.
        temperature: of so many equal groups of neighbouring rows; 0 takes the likeliest token.
        bound: from which on a token may be drawn, as `keep_bound` gives it.
        ids: whose noise each of the tokens gets; None: its own.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the rows are no equal groups.
    """
    if logits.shape[0] % temperature.shape[0]:
        raise ValueError(f"rows must be a multiple of the {temperature.shape[0]} groups, got {logits.shape[0]}")
    return choose(implementation, None, _pallas, _reference, logits, keys, temperature, bound, ids)
