"""Says from the headers of two checkpoints whether a drafter fits a target."""

from __future__ import annotations

import numpy as np

from convert.orbax import Header
from jspec.draft import auto
from jspec.draft import gemma4_assistant_head as assistant
from jspec.draft.draft_model import MAX_PADDING, other_mixers
from jspec.draft.head_config import HeadConfig
from jspec.draft.head_pair import Size, common_sizes, feature_fault
from jspec.draft.medusa import MedusaConfig
from jspec.models.config.decoder_config import ModelConfig


def compare(drafter: Header, target: Header) -> tuple[list[str], bool]:
    """Compare a draft head or a draft model with a target, without reading weights.

    Args:
        drafter: header of the draft head or draft model.
        target: header of the target.

    Returns:
        One line for each thing that must fit, and whether all fit. The line of a mismatch begins with "mismatch" and
        names both values.

    Raises:
        ValueError: the second checkpoint is no target.
    """
    if not isinstance(target.config, ModelConfig):
        raise ValueError(f"expected a target as the second folder, got a checkpoint of kind {target.kind!r}; swap them")
    target_config = target.config
    match drafter.config:
        case HeadConfig() as head:
            sizes = common_sizes(head, target_config, has_embed=owns(drafter, "embed"), has_head=owns(drafter, "head"))
            others = [_features(head, target_config), *_draft_vocabulary(drafter, head, target_config)]
        case MedusaConfig() as heads:
            sizes, others = [Size("hidden size", heads.hidden_size, target_config.hidden_size)], []
            sizes.append(Size("vocabulary", heads.vocab_size, target_config.vocab_size))
        case assistant.AssistantConfig() as head:
            sizes, others = assistant.common_sizes(head, target_config), [_target_keys(head, target_config)]
        case ModelConfig() as model:
            sizes, others = [], [_padded_vocabulary(model, target_config)]
            others += [
                (f"layers: attention in all of a draft model, got a {kind}", False) for kind in other_mixers(model)
            ]
    lines = [(str(size), size.is_equal) for size in sizes] + others
    return [f"{'fits' if fits else 'mismatch'}: {text}" for text, fits in lines], all(fits for _, fits in lines)


def owns(header: Header, parameter: str) -> bool:
    """Return whether a checkpoint has a parameter, quantised or not."""
    return bool({parameter, f"{parameter}.values"} & set(header.parameters))


def _padded_vocabulary(model: ModelConfig, target: ModelConfig) -> tuple[str, bool]:
    fits = abs(model.vocab_size - target.vocab_size) <= MAX_PADDING
    return f"vocabulary: the target has {target.vocab_size} tokens, the draft model {model.vocab_size}", fits


def _features(head: HeadConfig, target: ModelConfig) -> tuple[str, bool]:
    states = head.states_of(target.num_layers)
    if (fault := feature_fault(states, target.num_layers)) is not None:
        return fault, False
    names = ", ".join(map(str, states))
    return f"feature layers: states {names} of a target of {target.num_layers} layers", True


def _target_keys(head: assistant.AssistantConfig, target: ModelConfig) -> tuple[str, bool]:
    try:
        sources = assistant.sources_in(head, target)
    except ValueError as error:
        return str(error), False
    return f"keys and values: of the target's layers {', '.join(map(str, sorted(set(sources))))}", True


def _draft_vocabulary(header: Header, head: HeadConfig, target: ModelConfig) -> list[tuple[str, bool]]:
    if not owns(header, "draft_to_target"):
        return []
    ids = auto.read_draft_to_target(header)
    largest = int(np.max(ids))
    fits = largest < target.vocab_size
    text = f"draft vocabulary: {len(ids)} ids up to {largest}, the target has {target.vocab_size} tokens"
    return [(text, fits)]
