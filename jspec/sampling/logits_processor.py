"""Calls and checks the user's logits processor, a function that edits logits.

The processor is traced into the program. It runs after penalties and grammar, and before temperature. At every draft
node, the processor sees the node and its ancestors as if they had been generated. Therefore drafting changes no token
and no distribution, as long as the processor's result for a node depends only on the arguments for this node.

Tokens that controls or a grammar ban stay banned, whatever the processor returns. The processor must leave at least one
other token. If it leaves no token that the grammar allows, the request ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.config import EngineConfig
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import SlotView
from jspec.core.shorten import short
from jspec.core.tree import Tree


@struct.dataclass
class LogitsContext:
    """The second argument of a logits processor, which holds the tokens before each row of logits.

    The logits are [batch, nodes, vocab]. The context of node n in row b is the first ``size[b]`` tokens of ``text[b]``,
    then the tokens of ``path[b, n]``. Nodes are the draft tree's nodes, or one node without a draft. The processor is
    traced for each compiled program, and programs differ in nodes and depth.
    """

    text: Int[Array, "batch positions"]  # prompt and generated tokens by position; -1 from ``size`` on
    size: Int[Array, "batch"]  # number of tokens in text
    prompt_size: Int[Array, "batch"]  # number of prompt tokens
    path: Int[Array, "batch nodes depth"]  # drafted tokens after the text, up to the node's own token; then -1
    args: Float[Array, "batch args"]  # `SamplingParams.processor_args`, one column at least; 0 if the request has none

    @property
    def depth(self) -> Int[Array, "batch nodes"]:
        """Number of drafted tokens in each node's context."""
        return jnp.sum(self.path != NO_TOKEN, axis=-1, dtype=jnp.int32)

    @property
    def generated(self) -> Int[Array, "batch nodes"]:
        """Number of tokens after the prompt in each node's context."""
        return (self.size - self.prompt_size)[:, None] + self.depth

    def newest(self, count: int) -> Int[Array, "batch nodes count"]:
        """Return the last ``count`` tokens of each node's context, oldest first; shorter contexts begin with -1."""
        back = jnp.arange(count - 1, -1, -1)
        position = self.size[:, None, None] + self.depth[..., None] - 1 - back
        nodes, path_place = self.path.shape[1], position - self.size[:, None, None]
        text = jnp.broadcast_to(self.text[:, None], (len(self.text), nodes, self.text.shape[1]))
        tokens = jnp.take_along_axis(text, jnp.clip(position, 0, text.shape[-1] - 1), axis=-1)
        if self.path.shape[-1]:
            from_path = jnp.take_along_axis(self.path, jnp.clip(path_place, 0, self.path.shape[-1] - 1), axis=-1)
            tokens = jnp.where(path_place >= 0, from_path, tokens)
        return jnp.where(position >= 0, tokens, NO_TOKEN)


LogitsProcessor = Callable[[Array, LogitsContext], Array]


def apply(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Edit the logits with the user's logits processor (``view.processor``); tokens with logit -inf keep it.

    Args:
        path: token ids on the path to each node (`jspec.sampling.penalties.node_paths`).
    """
    assert view.processor is not None and view.controls is not None and view.token_history is not None
    prompt_size, args = (
        field.at[view.slots].get(mode="fill", fill_value=0)
        for field in (view.controls.prompt_size, view.controls.processor_args)
    )
    position = jnp.arange(view.token_history.shape[1])
    text = jnp.where(position == view.lengths[:, None], view.root[:, None], view.token_history)
    text = jnp.where(position <= view.lengths[:, None], text, NO_TOKEN)
    context = LogitsContext(text=text, size=view.lengths + 1, prompt_size=prompt_size, path=path, args=args)
    with jax.named_scope("processor"):
        return jnp.where(logits == -jnp.inf, -jnp.inf, view.processor(logits, context))


def check(processor: LogitsProcessor | None, config: EngineConfig, tree: Tree, vocab: int) -> None:
    """Trace a logits processor with all shapes of its later calls, to find its errors early.

    Args:
        processor: the user's function; None: there is no processor.
        tree: the drafter's tree.
        vocab: size of the vocabulary.

    Raises:
        ValueError: the processor is not a function, raises an error, or returns a value whose shape or dtype differs
            from that of the logits; or the engine's options do not fit the processor.
    """
    if processor is None:
        if config.processor_args:
            raise ValueError(
                f"processor_args: expected 0 without a logits_processor, got {config.processor_args}; pass one"
            )
        return
    if not config.controls:
        raise ValueError("logits_processor: expected controls=True beside it, got False; leave that out")
    if not callable(processor):
        raise ValueError(f"logits_processor: expected a function (logits, context) -> logits, got {short(processor)}")
    for nodes, depth in sorted({(1, 0), (tree.nodes, tree.depth), (tree.depth + 1, tree.depth)}):
        _trace(processor, nodes, depth, vocab, config.processor_args)


def _trace(processor: LogitsProcessor, nodes: int, depth: int, vocab: int, args: int) -> None:
    fields = dict(text=(7,), size=(), prompt_size=(), path=(nodes, depth))
    shapes = {name: jax.ShapeDtypeStruct((2, *inner), jnp.int32) for name, inner in fields.items()}
    shapes["args"] = jax.ShapeDtypeStruct((2, max(args, 1)), jnp.float32)
    logits = jax.ShapeDtypeStruct((2, nodes, vocab), jnp.float32)
    try:
        output: Any = jax.eval_shape(lambda x, named: processor(x, LogitsContext(**named)), logits, shapes)
    except Exception as error:
        raise ValueError(
            f"logits_processor: expected a function of jax operations on arrays, got {type(error).__name__} when it "
            f"was traced for logits {logits.shape} and paths of {depth} tokens: {error!s:.200}"
        ) from error
    if getattr(output, "shape", None) != logits.shape or getattr(output, "dtype", None) != logits.dtype:
        raise ValueError(
            f"logits_processor: expected logits of shape {logits.shape} and type float32 back, got {output}; return an "
            "array like the one that it is given"
        )
