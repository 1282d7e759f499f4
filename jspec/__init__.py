"""Lossless speculative decoding in JAX: one compiled program drafts, verifies, accepts and commits tokens."""

from jspec import plot, testing
from jspec.core.config import EngineConfig
from jspec.core.tree import Tree
from jspec.draft.base import Drafter
from jspec.draft.draft_model import DraftModel
from jspec.draft.eagle import Eagle, Eagle3
from jspec.draft.medusa import Medusa
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix
from jspec.engine.api import Engine
from jspec.engine.metrics import Metrics
from jspec.engine.request import Chunk, Completion, Round, TokenLogprob
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.sampling.logits_processor import LogitsContext

__all__ = [
    "Chunk",
    "Completion",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Engine",
    "EngineConfig",
    "LogitsContext",
    "Medusa",
    "Metrics",
    "Model",
    "NGram",
    "Round",
    "SamplingParams",
    "Suffix",
    "TokenLogprob",
    "Tree",
    "plot",
    "testing",
]
