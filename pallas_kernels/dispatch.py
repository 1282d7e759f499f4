"""Chooses between a Pallas kernel and its jax.numpy reference by the platform that a program is compiled for."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["auto", "pallas", "reference"]


def dispatch(
    implementation: Implementation,
    unsupported: str | None,
    kernel: Callable,
    reference: Callable,
    *arguments: Any,
) -> Any:
    """Returns the result of the kernel or of the reference for `arguments`.

    The choice is made when the program is lowered for a platform, not when it is traced. So a program that is compiled
    for a GPU on a machine without a GPU contains the kernel. Only the chosen function is compiled.

    Args:
        implementation: "auto": the kernel on an NVIDIA GPU if it supports the call, else the reference;
            "pallas": the kernel, interpreted on a CPU; "reference": the reference.
        unsupported: text that says which limit of the kernel this call exceeds; None: the kernel supports the call.
        kernel: function (*arguments, interpret=bool).
        reference: function (*arguments) that computes what the kernel computes.

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: implementation is "pallas" and the kernel does not support the call.
    """
    if implementation not in ("auto", "pallas", "reference"):
        raise ValueError(f'implementation must be "auto", "pallas" or "reference", got {implementation!r}')
    if implementation == "pallas" and unsupported:
        raise NotImplementedError(f'the kernel: {unsupported}; use implementation="reference" or "auto"')
    if implementation == "reference" or unsupported:
        return reference(*arguments)
    compiled = functools.partial(kernel, interpret=False)
    if implementation == "pallas":
        interpreted = functools.partial(kernel, interpret=True)
        return jax.lax.platform_dependent(*arguments, cuda=compiled, cpu=interpreted)
    return jax.lax.platform_dependent(*arguments, cuda=compiled, default=reference)


def resolve(implementation: str, device: jax.Device) -> str:
    """Returns `implementation`, but replaces "auto" by "reference" for a device that is not an NVIDIA GPU.

    So kernels that would not run on the device are not traced.
    """
    return "reference" if implementation == "auto" and not _capability(device) else implementation


def _capability(device: jax.Device) -> str:
    """Returns the compute capability of an NVIDIA GPU, like "9.0"; "" for any other device."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.replace(".", "").isdecimal() else ""  # for an AMD GPU this is a name, like "gfx90a"


def describe(implementation: str, device: jax.Device) -> str:
    """Returns a text that says which implementation `dispatch` runs on a device, and why.

    With "auto", a call that a kernel does not support runs the reference on every device.
    """
    capability = _capability(device)
    name = device.device_kind + (f", compute capability {capability}" if capability else "")
    if implementation == "reference":
        return f'references on {name}: asked for by implementation="reference"'
    if implementation == "pallas":
        how = "interpreted " if device.platform == "cpu" else ""
        return f'Pallas kernels {how}on {name}: asked for by implementation="pallas"'
    if capability:
        return f"Pallas kernels on {name}: an NVIDIA GPU"
    return f"references on {name}: not an NVIDIA GPU"
