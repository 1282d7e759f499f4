"""Drafting with the layer of a model that predicts further tokens (multi-token prediction, arXiv:2412.19437)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Self, final

from jspec.core.config import DEQUANTIZE
from jspec.core.tree import DEFAULT_TREE, Tree
from jspec.draft.draft_vocab import DraftVocab
from jspec.draft.eagle import EagleDrafter
from jspec.draft.eagle_head import EagleHead
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.mtp_format import mtp_format
from jspec.models import load


@final
class MTP(EagleDrafter):
    """Drafts with a target's own layer that predicts further tokens; the arguments are those of `EagleDrafter`.

    The layer computes the first draft token of a round. It computes the others too: it reads its own output instead of
    the target's state, as an EAGLE head does.
    """

    method = "mtp"

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str = DEFAULT_TREE,
        dtype: str | None = None,
        norm_output: bool = True,
        quantize: str | None = None,
        draft_window: int | None = None,
        draft_vocab: DraftVocab = None,
    ) -> Self:
        """Load the layer from the folder of its model, which is the target.

        Args:
            path: Hugging Face folder of the target, or hub id ("owner/name"); converted folders lack the layer.
            tree: draft tree of any kind, or its text such as "chain:4".
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            norm_output: whether the layer reads its normed output for the tokens after the first, as transformers and
                SGLang do; False: its output before the norm.
            quantize: "int8", "fp8", "fp8_dynamic" or "int4", how weights are quantised (`jspec.models.quantize`);
                "none": widen those that the folder quantises; None: as stored.
            draft_window: number of newest tokens that the layer attends to; None: all.
            draft_vocab: tokens that are drafted (`read_draft_vocab`); None: all.
        """
        format_of = partial(mtp_format, norm_output=norm_output, dequantize=quantize == DEQUANTIZE)
        found = load.read_checkpoint(path, format_of, kind="target", dtype=dtype, quantize=quantize)
        head = EagleHead.from_weights(found.config, found.weights)
        return cls(head, tree, draft_window=draft_window, draft_vocab=draft_vocab)
