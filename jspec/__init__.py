"""Lossless speculative decoding in JAX: a whole round is one compiled program."""

from jspec.draft import Drafter
from jspec.draft.eagle import Eagle, Eagle3
from jspec.draft.medusa import Medusa
from jspec.draft.model import DraftModel
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix
from jspec.engine import Engine
from jspec.metrics import Metrics
from jspec.models.decoder import Model
from jspec.processors import LogitsContext
from jspec.requests import Chunk, Completion, Round
from jspec.sampling_params import SamplingParams
from jspec.token_logprobs import TokenLogprob
from jspec.tree import Tree

__all__ = [
    "Chunk",
    "Completion",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Engine",
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
]
