"""A user's own edit of the logits, traced into the program: what it is shown, and where it may not interfere.

It comes behind the controls and the grammar and before temperature, at every node of a draft as if the node's
ancestors and the node itself had been generated: so with it too drafting changes neither a token nor a law, as long as
what it makes of a node depends on that node's row of the arguments alone. What controls or a grammar took out stays
out, whatever it says; of the rest it must leave something. Where it leaves nothing that a grammar allows, the request
ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.config import EngineConfig
from jspec.core.records import NO_TOKEN, SlotView
from jspec.core.tree import Tree


@struct.dataclass
class LogitsContext:
    """What a logits processor is shown beside the logits ``[batch, nodes, vocab]``.

    The context at node n of row b is ``text[b]`` up to ``size[b]``, then ``path[b, n]``. How many nodes there are, and
    how deep they may lie, differs from program to program: a processor is traced for each.
    """

    text: Int[Array, "batch positions"]  # prompt and generated tokens by position; -1 from ``size`` on
    size: Int[Array, "batch"]  # tokens of the text
    prompt_size: Int[Array, "batch"]  # of these, the prompt's
    path: Int[Array, "batch nodes depth"]  # drafted tokens behind the text, the node's own the last; -1 beyond
    args: Float[Array, "batch args"]  # `SamplingParams.processor_args`; zeros where a request gives none

    @property
    def depth(self) -> Int[Array, "batch nodes"]:
        """Drafted tokens of each node's context."""
        return jnp.sum(self.path != NO_TOKEN, axis=-1, dtype=jnp.int32)

    @property
    def generated(self) -> Int[Array, "batch nodes"]:
        """Tokens of each node's context that are not the prompt's."""
        return (self.size - self.prompt_size)[:, None] + self.depth

    def newest(self, count: int) -> Int[Array, "batch nodes count"]:
        """The last tokens of each node's context, the newest last; -1 before its beginning."""
        back = jnp.arange(count - 1, -1, -1)
        place = self.size[:, None, None] + self.depth[..., None] - 1 - back
        nodes, behind = self.path.shape[1], place - self.size[:, None, None]
        text = jnp.broadcast_to(self.text[:, None], (len(self.text), nodes, self.text.shape[1]))
        of_text = jnp.take_along_axis(text, jnp.clip(place, 0, text.shape[-1] - 1), axis=-1)
        if self.path.shape[-1]:
            of_path = jnp.take_along_axis(self.path, jnp.clip(behind, 0, self.path.shape[-1] - 1), axis=-1)
            of_text = jnp.where(behind >= 0, of_path, of_text)
        return jnp.where(place >= 0, of_text, NO_TOKEN)


LogitsProcessor = Callable[[Array, LogitsContext], Array]


def apply(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """The logits as the view's processor leaves them.

    Args:
        path: the tokens from behind the root to each node.
    """
    assert view.processor is not None and view.controls is not None and view.text is not None
    prompt_size, args = (
        field.at[view.slots].get(mode="fill", fill_value=0)
        for field in (view.controls.prompt_size, view.controls.processor_args)
    )
    position = jnp.arange(view.text.shape[1])
    text = jnp.where(position == view.lengths[:, None], view.root[:, None], view.text)
    text = jnp.where(position <= view.lengths[:, None], text, NO_TOKEN)
    context = LogitsContext(text=text, size=view.lengths + 1, prompt_size=prompt_size, path=path, args=args)
    with jax.named_scope("processor"):
        return jnp.where(logits == -jnp.inf, -jnp.inf, view.processor(logits, context))


def check(processor: LogitsProcessor | None, config: EngineConfig, tree: Tree, vocab: int) -> None:
    """Trace a processor for the shapes that it will be given.

    Args:
        tree: the drafter's.

    Raises:
        ValueError: it is no function, raises, or returns no logits of the same shape and type; or the engine's options
            do not go with it.
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
        raise ValueError(f"logits_processor: expected a function (logits, context) -> logits, got {processor!r}")
    for nodes, depth in sorted({(1, 0), (tree.nodes, tree.depth), (tree.depth + 1, tree.depth)}):
        _trace(processor, nodes, depth, vocab, config.processor_args)


def _trace(processor: LogitsProcessor, nodes: int, depth: int, vocab: int, args: int) -> None:
    fields = dict(text=(7,), size=(), prompt_size=(), path=(nodes, depth))
    shapes = {name: jax.ShapeDtypeStruct((2, *inner), jnp.int32) for name, inner in fields.items()}
    shapes["args"] = jax.ShapeDtypeStruct((2, args), jnp.float32)
    logits = jax.ShapeDtypeStruct((2, nodes, vocab), jnp.float32)
    try:
        found: Any = jax.eval_shape(lambda x, named: processor(x, LogitsContext(**named)), logits, shapes)
    except Exception as error:
        raise ValueError(
            f"logits_processor: it raised {type(error).__name__} when it was traced for logits {logits.shape} and "
            f"paths of {depth} tokens; it must be made of jax operations on arrays: {error}"
        ) from error
    if getattr(found, "shape", None) != logits.shape or getattr(found, "dtype", None) != logits.dtype:
        raise ValueError(
            f"logits_processor: expected logits of shape {logits.shape} and type float32 back, got {found}; return an "
            "array like the one that it is given"
        )
