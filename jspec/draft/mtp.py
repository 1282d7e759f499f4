"""Drafting with the layer of a model that predicts further tokens (multi-token prediction, arXiv:2412.19437)."""

from __future__ import annotations

from typing import final

from jspec.draft.eagle import EagleDrafter
from jspec.draft.formats.mtp_format import mtp_format
from jspec.draft.head_config import Overrides
from jspec.models.load import Format


@final
class MTP(EagleDrafter):
    """Drafts with a target's own layer that predicts further tokens; the arguments are those of `EagleDrafter`.

    The layer computes the first draft token of a round. It computes the others too: it reads its own output instead of
    the target's state, as an EAGLE head does. It is read from the Hugging Face folder of the target; converted folders
    lack it.
    """

    method, kind = "mtp", "target"

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return mtp_format(kind, norm_output=overrides.norm_output is not False, dequantize=dequantize)
