"""Reads drafters from checkpoints, onto one device or over the devices of a mesh."""

from __future__ import annotations

import abc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from jax.sharding import Mesh

from convert.fields import Fields
from convert.huggingface import MapRow
from convert.orbax import Checkpoint
from convert.sources import Source
from jspec.core.config import DEQUANTIZE
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.base import Drafter
from jspec.draft.draft_vocab import DraftVocab
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.head_config import Overrides
from jspec.models import load
from jspec.models.load import Check, Format
from jspec.models.weights.tensor_parallel import Weights


class Pretrained(Drafter):
    """Base class of drafters whose weights are in a checkpoint.

    A subclass says what differs between methods: the kind of its checkpoints, how their files are read (`file_format`),
    and the record of the weights.
    """

    method: ClassVar[str]  # name of the method, which is the kind of its checkpoints unless `kind` is another
    kind: ClassVar[str | None] = None  # kind of checkpoint (`convert.detect.KINDS`); None: the method's name
    # Record of the weights, with a function `from_weights` of config and weights. A record that can be divided over
    # devices (`Weights`) is read so; the formats of others declare weights that every device has.
    weights_type: ClassVar[Any]

    @abc.abstractmethod
    def __init__(self, weights: Any, tree: Tree | str, **options: Any) -> None: ...

    @classmethod
    @abc.abstractmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        """Return the format of the method's checkpoints, for overrides that apply to it; arguments of `format_of`."""

    @classmethod
    def format_of(cls, kind: str, overrides: Overrides | None = None, *, dequantize: bool = False) -> Format:
        """Return the format of the method's checkpoints, whose functions raise ValueError for a wrong override.

        Args:
            kind: kind of the checkpoint.
            overrides: config values that replace those of the checkpoint.
            dequantize: whether quantised weights are widened.
        """
        replacements = overrides or Overrides()
        form = cls.file_format(kind, replacements, dequantize)

        def from_hf(fields: Fields, source: Source) -> tuple[Any, list[MapRow]]:
            replacements.check(cls.method)
            return form.from_hf(fields, source)

        def override(config: Any) -> Any:
            replacements.check(cls.method)
            return form.override(config)

        return replace(form, from_hf=from_hf, override=override)

    @classmethod
    def read(
        cls,
        path: str | Path,
        overrides: Overrides | None = None,
        *,
        dtype: str | None = None,
        quantize: str | None = None,
        mesh: Mesh | None = None,
        check: Check | None = None,
    ) -> Any:
        """Read the weights of a checkpoint of this method.

        Args:
            path: an existing folder, or else a hub id ("owner/name").
            overrides: config values that replace those of the checkpoint.
            dtype, quantize, mesh, check: arguments of `jspec.models.load.load`, which lists the errors too.
        """
        format_of = partial(cls.format_of, overrides=overrides, dequantize=quantize == DEQUANTIZE)
        options: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "mesh": mesh, "check": check}
        return cls.weights_of(load.read_checkpoint(path, format_of, kind=cls.kind or cls.method, **options), mesh)

    @classmethod
    def weights_of(cls, checkpoint: Checkpoint, mesh: Mesh | None = None) -> Any:
        """Return the record of the weights of a checkpoint that was read for a mesh."""
        weights = cls.weights_type.from_weights(checkpoint.config, checkpoint.weights)
        return weights.replace(mesh=mesh) if isinstance(weights, Weights) else weights

    @staticmethod
    def max_depth(weights: Any) -> int | None:
        """Return how many tokens after the root the weights can draft; None: any number."""
        return None

    @classmethod
    def chain(cls, weights: Any, length: int = DEFAULT_TREE.depth) -> Tree:
        """Return a chain of ``length`` tokens, or of as many as the weights can draft if fewer."""
        deepest = cls.max_depth(weights)
        return Tree.chain(length if deepest is None else min(length, deepest))


class PretrainedHead(Pretrained):
    """Base class of drafters with a head that reads the target's hidden states."""

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str | None = None,
        dtype: str | None = None,
        rope_theta: float | None = None,
        feature_layers: tuple[int, ...] | None = None,
        norm_before_residual: bool | None = None,
        norm_output: bool | None = None,
        mask_token_id: int | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
        draft_vocab: DraftVocab = None,
    ) -> Self:
        """Load a head. Options that are None are taken from the head's config.json.

        Args:
            path: folder in the format of any known exporter, converted folder, or hub id ("owner/name"). An MTP layer
                is in the Hugging Face folder of its target; converted folders lack it.
            tree: draft tree that the method can draft, or its text such as "chain:4"; None: a chain of 5 tokens, or of
                as many as a block drafts if fewer.
            dtype: dtype of the weights, which for DFlash and DSpark must be the target's; None: float32 on CPU,
                bfloat16 elsewhere.
            rope_theta: rotary base; None: as in config.json, or 10000 if the file gives none. Not for MTP.
            feature_layers: indices of the target's hidden states that the head reads; they count as in
                `jspec.models.decoder.forward`. Not for MTP.
            norm_before_residual: EAGLE-3 and P-EAGLE: whether the first residual is the normed feature instead of the
                feature itself.
            norm_output: EAGLE-3: whether the head's normed output is the next feature (EAGLE-3.1). MTP: whether the
                layer reads its normed output for the tokens after the first, as transformers and SGLang do, which is
                the default.
            mask_token_id: P-EAGLE: target id whose embedding stands for tokens that are not drafted yet.
            quantize: "int8", "fp8", "fp8_dynamic" or "int4", how weights are quantised
                (`jspec.models.weights.quantize`); "none": widen those that the folder of an MTP layer quantises; None:
                as stored.
            draft_window: number of newest tokens that the head attends to; None: all.
            draft_vocab: tokens that a head with the target's output head drafts (`read_draft_vocab`); None: all.

        Raises:
            ValueError: an option is wrong or not one of this method.
        """
        layers = None if feature_layers is None else tuple(feature_layers)
        overrides = Overrides(rope_theta, layers, norm_before_residual, norm_output, mask_token_id)
        head = cls.read(path, overrides, dtype=dtype, quantize=quantize)
        tree = cls.chain(head) if tree is None else tree
        return cls(head, tree, draft_window=draft_window, draft_vocab=draft_vocab)
