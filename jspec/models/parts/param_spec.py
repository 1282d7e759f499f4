"""The declaration of a parameter: its shape, the names of its axes, and how random values are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convert.sources import Shape


@dataclass(frozen=True)
class ParamSpec:
    """The declaration of one parameter.

    Attributes:
        shape: shape of the parameter; linear weights are [out, in].
        axes: name of each axis.
        init: values of random weights: "normal" (standard deviation 1 / sqrt(in)), "ones", "zeros" or "range"
            (0, 1, 2, ...).
        dtype: dtype of the parameter; None: the dtype of the model.
        parts: for a parameter that is fused from several checkpoint tensors along axis 0, the sizes of these tensors
            along axis 0, in order; (): the parameter is one tensor.
        stored: the sizes of the tensors if they hold other rows than a part each; (): those of the parts.
        unit: number of rows that must stay together if the parameter is divided over devices, such as those of a head;
            or this number for each part. A part that is one unit is on every device.
    """

    shape: Shape
    axes: tuple[str, ...]
    init: str = "normal"
    dtype: str | None = None
    parts: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    unit: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), self
        assert all(sum(sizes) == self.shape[0] for sizes in (self.parts, self.stored) if sizes), self

    def part_shapes(self) -> list[Shape]:
        """Shapes of the checkpoint's tensors that are concatenated to this parameter."""
        return [(rows, *self.shape[1:]) for rows in self.stored or self.parts or self.shape[:1]]


Params = Mapping[str, ParamSpec]  # parameter name -> declaration


def norm(size: int, axis: str = "hidden", dtype: str | None = None) -> ParamSpec:
    """Declare the weight of a norm over ``size`` channels."""
    return ParamSpec((size,), (axis,), init="ones", dtype=dtype)


def prefixed(prefix: str, params: Params) -> dict[str, ParamSpec]:
    """Return the declarations with ``prefix.`` before each parameter name."""
    return {f"{prefix}.{name}": spec for name, spec in params.items()}
