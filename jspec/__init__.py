"""Lossless speculative decoding in JAX: one compiled program drafts, verifies, accepts and commits tokens.

Public names are imported when they are first used, so that the command line can answer before JAX is loaded.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from jspec.core.version import VERSION as __version__

if TYPE_CHECKING:
    from jspec import distributed, plot, testing, train
    from jspec.core.config import EngineConfig
    from jspec.core.tree import Tree
    from jspec.draft.base import Drafter
    from jspec.draft.beside import Beside
    from jspec.draft.dflash import DFlash
    from jspec.draft.dflash2 import DFlash2
    from jspec.draft.draft_model import DraftModel
    from jspec.draft.draft_vocab import frequent_tokens
    from jspec.draft.dspark import DSpark
    from jspec.draft.eagle import Eagle, Eagle3
    from jspec.draft.gemma4_assistant import Gemma4Assistant
    from jspec.draft.medusa import Medusa
    from jspec.draft.mtp import MTP
    from jspec.draft.ngram import NGram
    from jspec.draft.peagle import PEagle
    from jspec.draft.suffix import Suffix
    from jspec.draft.uno import UNO
    from jspec.engine.callers.api import Engine
    from jspec.engine.callers.replicas import Replicas
    from jspec.engine.request.metrics import Metrics
    from jspec.engine.request.request import Chunk, Completion, TokenLogprob
    from jspec.engine.request.round_record import Round
    from jspec.engine.request.sampling_params import SamplingParams
    from jspec.models.decoder import Model
    from jspec.sampling.logits_processor import LogitsContext

MODULES = {  # the module that defines each public name, except the names of modules
    "Beside": "jspec.draft.beside",
    "Chunk": "jspec.engine.request.request",
    "Completion": "jspec.engine.request.request",
    "DFlash": "jspec.draft.dflash",
    "DFlash2": "jspec.draft.dflash2",
    "DSpark": "jspec.draft.dspark",
    "DraftModel": "jspec.draft.draft_model",
    "Drafter": "jspec.draft.base",
    "Eagle": "jspec.draft.eagle",
    "Eagle3": "jspec.draft.eagle",
    "Engine": "jspec.engine.callers.api",
    "EngineConfig": "jspec.core.config",
    "Gemma4Assistant": "jspec.draft.gemma4_assistant",
    "LogitsContext": "jspec.sampling.logits_processor",
    "MTP": "jspec.draft.mtp",
    "Medusa": "jspec.draft.medusa",
    "Metrics": "jspec.engine.request.metrics",
    "Model": "jspec.models.decoder",
    "NGram": "jspec.draft.ngram",
    "PEagle": "jspec.draft.peagle",
    "Replicas": "jspec.engine.callers.replicas",
    "Round": "jspec.engine.request.round_record",
    "SamplingParams": "jspec.engine.request.sampling_params",
    "Suffix": "jspec.draft.suffix",
    "TokenLogprob": "jspec.engine.request.request",
    "Tree": "jspec.core.tree",
    "UNO": "jspec.draft.uno",
    "frequent_tokens": "jspec.draft.draft_vocab",
}

__all__ = [
    "MTP",
    "UNO",
    "Beside",
    "Chunk",
    "Completion",
    "DFlash",
    "DFlash2",
    "DSpark",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "Engine",
    "EngineConfig",
    "Gemma4Assistant",
    "LogitsContext",
    "Medusa",
    "Metrics",
    "Model",
    "NGram",
    "PEagle",
    "Replicas",
    "Round",
    "SamplingParams",
    "Suffix",
    "TokenLogprob",
    "Tree",
    "__version__",
    "distributed",
    "frequent_tokens",
    "plot",
    "testing",
    "train",
]


def __getattr__(name: str) -> object:
    """Import a public name or a submodule when it is first used.

    Raises:
        AttributeError: jspec has no such name.
    """
    if name in MODULES:
        value = getattr(import_module(MODULES[name]), name)
    elif find_spec(f"jspec.{name}"):
        value = import_module(f"jspec.{name}")
    else:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
