"""The configs of feed-forwards, dense ones and mixtures of experts, as frozen, hashable records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from convert.fields import CheckpointError
from jspec.models.parts.checks import positive_values, unsupported
from pallas_kernels.layers.experts.routing import Choice
from pallas_kernels.layers.quantize_rows import Activation

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Dense:
    """The config of a feed-forward, which is gated (arXiv:2002.05202) or not.

    Attributes:
        width: number of intermediate channels.
        activation: the activation function, of the gate if there is one: "silu", "gelu_tanh" (the approximation of GELU
            by tanh), "gelu", or without a gate "relu2" (the square of what is positive).
        is_gated: whether activation(gate) * up is projected down; False: activation(up).
    """

    width: int
    activation: Activation = "silu"
    is_gated: bool = True

    def row_size(self, hidden: int) -> int:
        """Return how many values a row has inside: those of gate, if there is one, and up, and what is projected down.

        Args:
            hidden: number of channels of the residual stream.
        """
        return (3 if self.is_gated else 2) * self.width

    def check(self) -> None:
        """Check the width and the activation.

        Raises:
            ValueError: the width is not positive.
            NotImplementedError: the activation is not supported.
        """
        positive_values("config", {"intermediate_size": self.width})
        _check_activation(self.activation, self.is_gated)


@dataclass(frozen=True)
class NoMlp:
    """The feed-forward of a layer without one, which has a mixer alone (Nemotron-H)."""

    def row_size(self, hidden: int) -> int:
        """Return 0, as nothing is computed; `Dense.row_size`."""
        return 0

    def check(self) -> None:
        """It has no sizes; `Dense.check`."""


def _check_activation(activation: Activation, is_gated: bool) -> None:
    supported = [name for name in ACTIVATIONS if name != "relu2" or not is_gated]
    if activation not in supported:
        raise unsupported("hidden_act", activation, " or ".join(map(repr, supported)))


@dataclass(frozen=True)
class Router(Choice):
    """How each row of a mixture of experts chooses its experts, and how it weights their outputs.

    Attributes:
        bias: whether the logits have a bias.
        correction: whether there is a correction of the scores (arXiv:2408.15664), which counts for the choice but not
            for the weights.
        scaled: whether the weights of each expert have a learned factor (Gemma 4).
    """

    scaled: bool = False
    bias: bool = False
    correction: bool = False

    def check(self) -> None:
        """Check the numbers and the kind of scores.

        Raises:
            ValueError: a number is impossible.
            NotImplementedError: the kind of scores is not supported.
        """
        numbers = {"num_experts": self.count, "num_experts_per_tok": self.chosen, "routed_scaling_factor": self.factor}
        positive_values("config", numbers | {"n_group": self.groups, "topk_group": self.chosen_groups})
        if self.scores not in SCORES:
            raise unsupported("scoring_func", self.scores, " or ".join(map(repr, SCORES)))
        if self.groups > 1 and self.summed != (1 if self.scores == "softmax" else 2):
            best = "largest" if self.scores == "softmax" else "sum of the two largest"
            expected = f"groups by the {best} of {self.scores} scores"
            raise unsupported("topk_method", f"the sum of the {self.summed} largest", expected)
        if self.count % self.groups or (self.groups > 1 and self.count < self.summed * self.groups):
            raise CheckpointError(
                "n_group",
                f"expected a divisor of the {self.count} experts, at least {self.summed} a group, got {self.groups}; "
                "correct config.json",
            )
        if self.chosen_groups > self.groups:
            raise CheckpointError(
                "topk_group", f"expected at most n_group {self.groups}, got {self.chosen_groups}; correct config.json"
            )
        if self.chosen > (most := self.count // self.groups * self.chosen_groups):
            raise CheckpointError(
                "num_experts_per_tok",
                f"expected at most {most}, the experts to choose from, got {self.chosen}; correct config.json",
            )


@dataclass(frozen=True)
class Experts:
    """The config of a mixture of experts (arXiv:1701.06538): feed-forwards of which each row uses some.

    Attributes:
        width: number of intermediate channels of an expert.
        router: how a row chooses its experts.
        activation, is_gated: of each expert and of the shared one, as in `Dense`.
        shared: number of intermediate channels of the feed-forward that every row uses beside its experts; 0: none.
        bias: whether the experts' projections have biases.
        limit: limit c of gate g and up u (gpt-oss): an expert computes g * sigmoid(alpha * g) * (u + 1), after g is
            limited to at most c, and u to between -c and c. None: an expert computes activation(g) * u.
        alpha: factor of the gate in the sigmoid, with a limit.
        weighs_inputs: whether the router's weights multiply the inputs of experts (Llama 4), not their outputs.
        gates_shared: whether the shared expert's output has a factor, the sigmoid of one more product of the input.
        has_norms: whether the router, the experts and the shared expert each have a norm of their own before them, and
            the sum of the experts' outputs and the shared expert's output one after them (Gemma 4).
        latent: number of channels of the experts' inputs and outputs, to which the input is projected, and from which
            the sum of the weighted outputs is projected back (Nemotron 3 Super); None: those of the residual stream.
    """

    width: int
    router: Router
    activation: Activation = "silu"
    is_gated: bool = True
    shared: int = 0
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.0
    weighs_inputs: bool = False
    gates_shared: bool = False
    has_norms: bool = False
    latent: int | None = None

    @property
    def shared_count(self) -> int:
        """Number of experts that the shared one may be, whose outputs add up to its own; 0: it cannot be any."""
        is_alike = self.shared % self.width == 0 and self.limit is None and not self.bias and not self.has_norms
        is_alike = is_alike and self.latent is None
        return self.shared // self.width if is_alike else 0

    def row_size(self, hidden: int) -> int:
        """Return how many values the products compute for a row: those of `Dense`, and each expert's output,
        and its input if that has a weight.

        Args:
            hidden: number of channels of the residual stream.
        """
        of_shared = (3 if self.is_gated else 2) * self.shared
        return of_shared + self.router.chosen * (self.width + hidden * (1 + self.weighs_inputs))

    def check(self) -> None:
        """Check the sizes and options.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        positive_values("config", {"moe_intermediate_size": self.width, "swiglu_alpha": self.alpha})
        _check_activation(self.activation, self.is_gated)
        if not self.is_gated and (self.limit is not None or self.bias or self.has_norms or self.gates_shared):
            raise unsupported("is_gated", False, "True with a limit, biases, norms, or a factor of the shared expert")
        if self.latent is not None:
            positive_values("config", {"moe_latent_size": self.latent})
            if self.has_norms or self.weighs_inputs:
                raise unsupported("moe_latent_size", self.latent, "none with norms of experts or weights of the inputs")
        if self.limit is not None:
            positive_values("config", {"swiglu_limit": self.limit})
            if self.activation != "silu":
                raise unsupported("hidden_act", self.activation, "'silu' with swiglu_limit")
        if self.has_norms and (not self.shared or self.gates_shared or self.weighs_inputs):
            raise unsupported("has_norms", True, "False without a plain shared expert, or with weights of the inputs")
        self.router.check()


Mlp = Dense | Experts | NoMlp
