"""Lossless speculative decoding in JAX: a whole round is one compiled program."""

from jspec.draft import Drafter
from jspec.draft.eagle import Eagle3
from jspec.draft.model import DraftModel
from jspec.engine import Engine
from jspec.metrics import Metrics
from jspec.models.decoder import Model
from jspec.requests import Chunk, Completion, Round, SamplingParams
from jspec.tree import Tree

__all__ = [
    "Chunk",
    "Completion",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Engine",
    "Metrics",
    "Model",
    "Round",
    "SamplingParams",
    "Tree",
]
