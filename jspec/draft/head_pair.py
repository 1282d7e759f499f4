"""Compares the sizes of a draft head with those of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jspec.draft.head_config import LEAST_LAYERS, HeadConfig
from jspec.models.config.decoder_config import ModelConfig


@dataclass(frozen=True)
class Size:
    """A size that a head and its target must have in common.

    Attributes:
        name: name of the size.
        head: the head's value.
        target: the value that the target needs.
    """

    name: str
    head: int
    target: int

    @property
    def is_equal(self) -> bool:
        return self.head == self.target

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.name}: {self.head}"
        return f"{self.name}: the target needs {self.target}, the head has {self.head}"


def common_sizes(head: HeadConfig, target: ModelConfig, *, has_embed: bool, has_head: bool) -> list[Size]:
    """List the sizes that an EAGLE, DFlash or DSpark head and its target must have in common.

    Args:
        head: config of the head.
        target: config of the target.
        has_embed: whether the head has an embedding of its own.
        has_head: whether the head has an output head of its own.
    """
    sizes = [
        Size("vocabulary", head.vocab_size, target.vocab_size),
        Size("target hidden size", head.target_hidden_size, target.hidden_size),
    ]
    shared = {
        "it takes the target's state as it is": not head.fuses_states,
        "it shares the target's output head": not has_head,
        "it shares the target's embedding": not has_embed,
    }
    reasons = [reason for reason, is_so in shared.items() if is_so]
    return sizes + [Size(f"hidden size ({reason})", head.hidden_size, target.hidden_size) for reason in reasons]


def feature_fault(states: tuple[int, ...], num_layers: int) -> str | None:
    """Return what is wrong with the feature layers of a head for a target, or None if nothing is.

    Args:
        states: indices of the target's hidden states that the head reads.
        num_layers: number of layers of the target.
    """
    if all(0 <= state <= num_layers + 1 for state in states) and len(set(states)) == len(states):
        return None
    return (
        f"feature layers {states} do not exist or repeat in a target of {num_layers} layers; "
        f"pass feature_layers= (the default 2, N//2, N-3 needs at least {LEAST_LAYERS} layers)"
    )


def check_fit(name: str, states: tuple[int, ...], num_layers: int, sizes: Sequence[Size]) -> None:
    """Raise ValueError if feature layers or sizes of a head do not match a target.

    Args:
        name: name of the drafter, for the error.
        states, num_layers: arguments of `feature_fault`.
        sizes: sizes that head and target must have in common.
    """
    if (fault := feature_fault(states, num_layers)) is not None:
        raise ValueError(f"{name}: {fault}")
    for size in sizes:
        if not size.is_equal:
            raise ValueError(f"{name}: {size}; use a head made for this target")
