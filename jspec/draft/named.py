"""Makes a drafter from a method's name, a checkpoint or an object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jspec.core.shorten import short
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.auto import load_drafter
from jspec.draft.base import Drafter
from jspec.draft.beside import Beside
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix

LOOKUPS: Mapping[str, type[NGram | Suffix]] = {"ngram": NGram, "suffix": Suffix}
AUTO = "auto"  # the drafter that the folder of a target decides
# Draft tokens of a look-up that joins a tree: longer chains gain little more in text that is copied, nothing elsewhere.
LOOKUP_LENGTH = 10
WITHOUT_WEIGHTS: Mapping[str, Callable[[], Drafter | None]] = {"none": lambda: None, **LOOKUPS}
EXPECTED = (
    'a Drafter, "ngram", "suffix", a path or hub id (owner/name), a head\'s path with "+suffix" at its end, or None'
)

DrafterSource = Drafter | str | os.PathLike[str] | None


def make_drafter(source: Any, *, dtype: str | None = None, mesh: Mesh | None = None) -> Drafter | None:
    """Make a drafter from a method's name, a checkpoint or an object.

    Args:
        source: a drafter; "ngram" or "suffix"; or a folder or hub id ("owner/name") of a draft head or draft model of
            any kind, which then drafts its default tree. A head's folder or id may end with "+ngram" or "+suffix": then
            a look-up drafts beside the head (`with_lookup`). None or "none": no drafter.
        dtype: dtype of the weights to load; None: float32 on CPU, bfloat16 elsewhere.
        mesh: mesh over whose devices loaded weights are divided; None: the default device.

    Raises:
        TypeError, ValueError: the source is something else; the message says which call to use.
        FileNotFoundError: the folder does not exist.
    """
    if source is None or isinstance(source, Drafter):
        return source
    if isinstance(source, str) and source in WITHOUT_WEIGHTS:
        return WITHOUT_WEIGHTS[source]()
    if isinstance(source, str) and not _is_folder(source):
        head, _, lookup = source.rpartition("+")
        if head and lookup in LOOKUPS:
            return with_lookup(make_drafter(head, dtype=dtype, mesh=mesh), lookup)
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_place(source)):
        return load_drafter(source, dtype=dtype, mesh=mesh)
    if isinstance(source, str) and source == AUTO:
        raise ValueError(f'drafter: "{AUTO}" expected a target by its path, got one in memory; name the drafter')
    raise (ValueError if isinstance(source, str) else TypeError)(
        f"drafter: expected {EXPECTED}, got {short(source)}{_remedy(source)}"
    )


def with_lookup(model: Drafter | None, lookup: str, join: str | None = None) -> Beside:
    """Return a drafter with a look-up beside a head.

    The look-up's chain is as long as the head's tree is deep; if it joins the tree, it has at least `LOOKUP_LENGTH`
    tokens, because copied text is often longer than a head's draft.

    Args:
        model: the head.
        lookup: "ngram" or "suffix".
        join: argument of `Beside`; None: "replace" if the head drafts a chain, else "beside".

    Raises:
        TypeError, ValueError, NotImplementedError: as `Beside`.
    """
    tree = DEFAULT_TREE if model is None else model.tree
    join = ("replace" if tree.is_chain else "beside") if join is None else join
    length = tree.depth if join == "replace" else max(tree.depth, LOOKUP_LENGTH)
    return Beside(model, LOOKUPS[lookup](Tree.chain(length)), join)  # type: ignore[arg-type]


def _is_place(source: str) -> bool:
    """Return whether a text is a folder, or has the form of a path or of a hub id."""
    return "\0" not in source and ("/" in source or os.sep in source or _is_folder(source))


def _is_folder(source: str) -> bool:
    return "\0" not in source and os.path.isdir(source)


def _remedy(source: Any) -> str:
    """Return the call that makes a drafter from a class, an object with weights or a method's name, as text."""
    name = getattr(source, "__name__", None) if isinstance(source, type) else None
    if name is not None and issubclass(source, Drafter):
        loads = hasattr(source, "from_pretrained")
        return f"; pass an object: {name}.from_pretrained(path)" if loads else f"; pass an object: {name}()"
    calls = {
        "Model": "jspec.DraftModel(model)",
        "EagleHead": "jspec.Eagle3(head), jspec.PEagle(head), jspec.Eagle(head) or jspec.MTP(head)",
        "MedusaHeads": "jspec.Medusa(heads)",
        "DFlashHead": "jspec.DFlash(head)",
        "DFlash2Head": "jspec.DFlash2(head)",
        "DSparkHead": "jspec.DSpark(head)",
        "AssistantHead": "jspec.Gemma4Assistant(head)",
    }
    call = calls.get(type(source).__name__)
    if call is not None:
        return f"; pass {call}"
    return "; a method with weights needs their path" if isinstance(source, str) else ""
