"""Finds the tree of the most probable paths through a block of independent distributions, in one kernel.

The log-probability of a path is the sum of those of its tokens. So a path is at most as probable as the path without
its last token, and as the path whose last token is the next likelier one at that depth. The kernel therefore takes the
paths in the order of their probabilities: it holds the paths that may be next, and takes the best of them. Then the
path with the next token of the same depth takes its place, and the path with one token more joins them.

A path that may be next is an integer, (depth * nodes + parent) * k + rank of its token; no path is `OUT`. Of equally
probable paths the kernel takes the one with the smallest integer. The reference finds the best paths of each depth with
one kernel each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import HOPPER, Implementation, Kernel, dispatch
from pallas_kernels.sampling.top_log_probs import OUT, top, top_in_order

LANES = 128  # threads of a warpgroup
MOST_NODES = 1024  # most nodes of a tree; each thread holds the paths of nodes / 128


def _best_tree(root_ref, tokens_ref, log_probs_ref, *refs, nodes, depth, k):
    """Drafts the tree of one row, in one CTA of one warpgroup.

    Scalars are stored by all threads, which store the same values, and read by each thread after its own store.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *out_refs, scores_ref, paths_ref, places_ref = refs
    tokens_out, parents_out, scores_out = out_refs
    row, slots = lax.axis_index("row"), LANES * pl.cdiv(nodes, LANES)

    def per_slot(values):
        return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED((slots,), slots // LANES))

    slot = per_slot(lax.broadcasted_iota(jnp.int32, (slots,), 0))

    def split(path):
        """Returns the rank of a path's token, its parent, and its depth, from 0 on."""
        return path % k, path // k % nodes, path // (k * nodes)

    def log_prob(depth, rank):
        value = log_probs_ref[row, depth, rank]
        return jnp.where(value == value, value, -jnp.inf)  # a NaN would never be the largest score

    def take(index, found):
        """Takes the path number `index` and adds its two followers; `depths` holds the depth of each path taken."""
        scores, paths, depths = found
        score = jnp.max(scores)
        path = jnp.min(jnp.where(scores == score, paths, OUT))
        rank, parent, own_depth = split(path)
        scores_ref[index], paths_ref[index] = score, path
        before = jnp.where(parent == 0, 0.0, scores_ref[jnp.maximum(parent - 1, 0)])
        is_last, is_leaf = rank + 1 == k, own_depth + 1 == depth
        next_score = before + log_prob(own_depth, jnp.minimum(rank + 1, k - 1))
        child_score = score + log_prob(jnp.minimum(own_depth + 1, depth - 1), 0)
        child = ((own_depth + 1) * nodes + index + 1) * k
        is_own, is_new = paths == path, slot == index + 1
        scores = jnp.where(is_own, jnp.where(is_last, -jnp.inf, next_score), scores)
        scores = jnp.where(is_new, jnp.where(is_leaf, -jnp.inf, child_score), scores)
        paths = jnp.where(is_own, jnp.where(is_last, OUT, path + 1), paths)
        paths = jnp.where(is_new, jnp.where(is_leaf, OUT, child), paths)
        return scores, paths, jnp.where(slot == index, own_depth, depths)

    scores = jnp.where(slot == 0, log_prob(0, 0), per_slot(jnp.full(slots, -jnp.inf, jnp.float32)))
    paths, depths = jnp.where(slot == 0, 0, OUT), per_slot(jnp.full(slots, depth, jnp.int32))
    _, _, depths = lax.fori_loop(0, nodes - 1, take, (scores, paths, depths))
    tokens_out[row, 0], parents_out[row, 0], scores_out[row, 0] = root_ref[row], -1, 0.0

    def store(index, _):
        """Stores the path number `index` in its place: after those of smaller depth, and after those taken before."""
        path = paths_ref[index]
        rank, parent, own_depth = split(path)
        is_before = (depths < own_depth) | ((depths == own_depth) & (slot < index))
        place = 1 + jnp.sum(is_before.astype(jnp.int32))
        places_ref[index] = place
        tokens_out[row, place] = tokens_ref[row, own_depth, rank]
        parents_out[row, place] = jnp.where(parent == 0, 0, places_ref[jnp.maximum(parent - 1, 0)])
        scores_out[row, place] = scores_ref[index]

    lax.fori_loop(0, nodes - 1, store, None)


def run_kernel(root, tokens, log_probs, *, nodes, interpret):
    """Returns the result of `best_tree`, computed by the kernel; `interpret` is False, or jax's own parameters."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    rows, depth, k = log_probs.shape

    def entry(*refs):
        def run(*memory):
            _best_tree(*refs, *memory, nodes=nodes, depth=depth, k=k)

        pl.run_scoped(run, *(plgpu.SMEM((nodes,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)))

    return plgpu.kernel(
        entry,
        out_type=[jax.ShapeDtypeStruct((rows, nodes), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)],
        grid=(rows,),
        grid_names=("row",),
        kernel_name="best_tree",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(root, tokens, log_probs)


def choose_nodes(
    scores: Float[Array, "rows candidates"],
    parents: Int32[Array, "rows candidates"],
    count: int,
    *,
    implementation: Implementation = "auto",
) -> tuple[Int32[Array, "rows count"], Int32[Array, "rows count"]]:
    """Returns the indices of the `count` best candidates in ascending order, and their parents as nodes of a tree.

    Node 0 is the root, and node 1 + i is the i-th of the chosen candidates.

    Args:
        scores: float32 scores of all candidates; a candidate comes after its parent and has no larger score, so the
            parent of a chosen candidate is chosen too.
        parents: indices of their parents among the candidates; -1: the root.
        count: number of candidates to choose.
        implementation: as in `paged_attention`.
    """
    chosen = top_in_order(scores, count, implementation=implementation)
    is_parent = jnp.take_along_axis(parents, chosen, axis=1)[:, :, None] == chosen[:, None]
    return chosen, jnp.sum(jnp.where(is_parent, jnp.arange(1, count + 1), 0), axis=-1, dtype=jnp.int32)


def _reference(root, tokens, log_probs, *, nodes, implementation):
    """Finds the best paths of each depth among the children of those of the depth above, and chooses among them."""
    rows, depth, k = log_probs.shape
    scores, first, levels = jnp.zeros((rows, 1)), -1, []  # of the depth above, and its first candidate's index
    for index in range(depth):
        children = (scores[:, :, None] + log_probs[:, index, None]).reshape(rows, -1)
        kept = min(children.shape[1], nodes - 1)
        scores, best, parents = top(children, kept, group=k, implementation=implementation)
        levels.append((jnp.take_along_axis(tokens[:, index], best % k, axis=1), scores, first + parents))
        first = sum(level[0].shape[1] for level in levels[:-1])
    own, scores, parents = (jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
    chosen, parents = choose_nodes(scores, parents, nodes - 1, implementation=implementation)
    own, scores = (jnp.take_along_axis(field, chosen, axis=1) for field in (own, scores))
    with_root = ((root, own), (jnp.full_like(root, -1), parents), (jnp.zeros(rows), scores))
    return [jnp.concatenate([of_root[:, None], of_nodes], axis=1) for of_root, of_nodes in with_root]


@functools.partial(jax.jit, static_argnames=("nodes", "implementation"))
def best_tree(
    root: Int32[Array, " rows"],
    tokens: Int32[Array, "rows depth k"],
    log_probs: Float[Array, "rows depth k"],
    nodes: int,
    *,
    implementation: Implementation = "auto",
) -> tuple[Int32[Array, "rows nodes"], Int32[Array, "rows nodes"], Float[Array, "rows nodes"]]:
    """Returns the tree of the root and the `nodes - 1` most probable paths: tokens, parents and scores of its nodes.

    The nodes are in the order of their depths, and those of one depth in the order of their scores. The root's parent
    is -1, and its score 0; another node's score is the log-probability of its path. On a Hopper GPU with jax 0.11 or
    newer one kernel does this.

    Args:
        root: the root's token in each row.
        tokens: the k likeliest tokens of each depth.
        log_probs: their log-probabilities, float32, largest first.
        nodes: number of nodes, at most one more than there are paths.
        implementation: as in `paged_attention`, but a CPU always runs the reference.
    """
    kernel = functools.partial(run_kernel, nodes=nodes)
    reference = functools.partial(_reference, nodes=nodes, implementation=implementation)
    _, depth, k = log_probs.shape
    is_too_large = nodes > MOST_NODES or depth * nodes * k > OUT
    return tuple(
        dispatch(implementation, [Kernel(HOPPER, kernel, bool(is_too_large))], reference, root, tokens, log_probs)
    )
