"""Chooses between a kernel and its reference, for the platform that a program is compiled for."""

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
    """Applies the kernel or the reference to `arguments`.

    The platform is known when the program is lowered, not when it is traced: a program compiled for a GPU on a CPU-only
    machine holds the kernel, and only the chosen branch reaches the compiler.

    Args:
        implementation: "auto": the kernel on an NVIDIA GPU where the call is supported, else the reference;
            "pallas": the kernel, interpreted on a CPU; "reference": the reference.
        unsupported: the limit of the kernel that this call exceeds; None if it is supported.
        kernel: function of the arguments and `interpret`.
        reference: function of the arguments.

    Raises:
        ValueError: unknown implementation.
        NotImplementedError: "pallas" for a call that is not supported.
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
    """Resolves "auto" for a device to "reference" unless it is an NVIDIA GPU, so that unused kernels are not traced."""
    return "reference" if implementation == "auto" and not _capability(device) else implementation


def _capability(device: jax.Device) -> str:
    """Compute capability of an NVIDIA GPU; "" for any other device."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.replace(".", "").isdecimal() else ""  # AMD's is a name, like "gfx90a"


def describe(implementation: str, device: jax.Device) -> str:
    """Says what `dispatch` runs on a device, and why; unsupported calls run the reference anyway."""
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
