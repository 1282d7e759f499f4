"""Which implementation of a kernel runs: decided for the platform a program is compiled for."""

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

    The platform is known when the program is lowered, not when it is traced, so that a program compiled on a
    CPU-only machine for a GPU holds the kernel; only the chosen branch reaches the compiler.

    Args:
        implementation: "auto": the kernel on an NVIDIA GPU where the call is supported, else the reference;
            "pallas": the kernel, interpreted on a CPU; "reference".
        unsupported: the limit of the kernel that this call breaks, if any.
        kernel: takes the arguments and `interpret`.

    Raises:
        NotImplementedError: "pallas" is asked for and unsupported.
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
    """What "auto" comes to in programs for one device alone; kernels that they would not hold are not traced then."""
    return "reference" if implementation == "auto" and not _capability(device) else implementation


def _capability(device: jax.Device) -> str:
    """Compute capability of an NVIDIA GPU; "" of any other device."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability if capability.replace(".", "").isdecimal() else ""  # AMD's is a name


def describe(implementation: str, device: jax.Device) -> str:
    """Says what `dispatch` takes on a device, and why; a call that a kernel does not support takes its reference."""
    capability = _capability(device)
    where = device.device_kind + (f", compute capability {capability}" if capability else "")
    if implementation == "reference":
        return f'references on {where}: asked for by implementation="reference"'
    if implementation == "pallas":
        how = "interpreted " if device.platform == "cpu" else ""
        return f'Pallas kernels {how}on {where}: asked for by implementation="pallas"'
    if capability:
        return f"Pallas kernels on {where}: an NVIDIA GPU"
    return f"references on {where}: not an NVIDIA GPU"
