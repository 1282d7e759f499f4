"""Chooses the kernel of a function by the device that a program is compiled for.

A function has a table of kernels, in the order in which they are preferred, and a reference in jax.numpy:

    dispatch(implementation, [Kernel(HOPPER, wide), Kernel(TRITON, kernel, unsupported)], reference, *arguments)

A kernel for another vendor's devices, or in another language, is a row of this table with a `Backend` of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax

Implementation = Literal["auto", "pallas", "reference"]
Capability = tuple[int, int]  # compute capability of an NVIDIA GPU, (9, 0) for an H200


class TracedGPU(NamedTuple):
    """What is known of the NVIDIA GPU that a program is traced for."""

    capability: Capability
    multiprocessors: int


class Backend(NamedTuple):
    """A language of kernels, and the devices on which they run."""

    platform: str  # as `jax.lax.platform_dependent` names it
    capabilities: tuple[Capability, Capability] | None  # least and largest; None: any, also unknown ones
    is_interpreted: bool  # whether jax can interpret such a kernel within a program for a CPU
    least_jax: tuple[int, ...] = ()  # least version of jax

    def gpu(self) -> TracedGPU | None:
        """Returns the GPU that the program is traced for; None if kernels of this backend do not run there.

        Only for a backend with `capabilities`.
        """
        assert self.capabilities is not None
        gpu = traced_gpu() if jax.__version_info__ >= self.least_jax else None
        least, largest = self.capabilities
        return gpu if gpu is not None and least <= gpu.capability <= largest else None

    @property
    def may_run(self) -> bool:
        """Whether the device that the program is traced for, if that is known, has kernels of this backend."""
        return self.capabilities is None or self.gpu() is not None


TRITON = Backend("cuda", None, is_interpreted=True)
# jax before 0.11 cannot compile a Mosaic GPU kernel on a machine without a GPU. It interprets such a kernel only with
# special parameters and with side effects, which are not allowed in a branch of `platform_dependent`.
HOPPER = Backend("cuda", ((9, 0), (9, 0)), is_interpreted=False, least_jax=(0, 11))
HOPPER_TRITON = HOPPER._replace(is_interpreted=True)  # kernels in Triton that are faster than others on Hopper only
BACKENDS = (TRITON, HOPPER, HOPPER_TRITON)  # on devices of other platforms an engine runs the references (`resolve`)


class Kernel(NamedTuple):
    """A row of a function's table."""

    backend: Backend
    run: Callable  # function (*arguments, interpret=bool)
    # Whether the call exceeds a limit of the kernel, so that another kernel or the reference serves it. A text says
    # which limit; then "pallas" is an error if no other kernel serves the call.
    unsupported: str | bool | None = None


def dispatch(implementation: Implementation, kernels: Sequence[Kernel], reference: Callable, *arguments: Any) -> Any:
    """Returns the result of one of the kernels or of the reference for `arguments`.

    The platform is that for which the program is lowered, not traced. So a program that is compiled for a GPU on a
    machine without a GPU contains the kernel. Only the chosen function is compiled. A range of compute capabilities is
    compared with the GPU that the program is traced for (`traced_gpu`).

    Args:
        implementation: "auto": the first kernel that runs on the device and supports the call, else the reference;
            "pallas": the same, but a CPU interprets the first kernel that it can interpret, and a limit that is named
            by a text is an error; "reference": the reference.
        kernels: the function's table.
        reference: function (*arguments) that computes what the kernels compute.

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: implementation is "pallas" and no kernel supports the call.
    """
    if implementation not in ("auto", "pallas", "reference"):
        raise ValueError(f'implementation must be "auto", "pallas" or "reference", got {implementation!r}')
    if implementation == "reference":
        return reference(*arguments)
    present = [kernel for kernel in kernels if kernel.backend.may_run]
    fitting = [kernel for kernel in present if not kernel.unsupported]
    limits = [kernel.unsupported for kernel in present if isinstance(kernel.unsupported, str)]
    if implementation == "pallas" and limits and not fitting:
        raise NotImplementedError(f'the kernel: {limits[0]}; use implementation="reference" or "auto"')
    # The first kernel of a platform is the last one that is written into the dictionary.
    branches = {row.backend.platform: functools.partial(row.run, interpret=False) for row in reversed(fitting)}
    if not branches:
        return reference(*arguments)
    interpreted = [kernel.run for kernel in fitting if kernel.backend.is_interpreted]
    if implementation == "pallas" and interpreted:
        cpu = functools.partial(interpreted[0], interpret=True)
        return jax.lax.platform_dependent(*arguments, cpu=cpu, **branches)
    return jax.lax.platform_dependent(*arguments, default=reference, **branches)


# Compute capabilities of GPUs that programs are compiled for without being there, by their kind; None: not NVIDIA's.
_DESCRIBED: dict[str, Capability | None] = {}


def describe_gpu(device: jax.Device) -> None:
    """Makes known the compute capability of a GPU that is only described, before a program is traced for it."""
    _DESCRIBED[device.device_kind] = capability_of(device)


def traced_gpu() -> TracedGPU | None:
    """Returns the NVIDIA GPU that the program is traced for, or None if that is another device.

    It is the device of the current mesh, else the first one of this process. The device of a mesh tells its kind but
    not its compute capability, which is that of this process's device of the same kind, or of `describe_gpu`.

    Raises:
        ValueError: the mesh's device is a GPU of a kind that is not known.
    """
    local = jax.local_devices()
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is None:
        capability = capability_of(local[0])
        return None if capability is None else TracedGPU(capability, local[0].core_count)
    if abstract.platform != "gpu":
        return None
    here = {device.device_kind: capability_of(device) for device in local if device.platform == "gpu"}
    kinds = here | _DESCRIBED
    if abstract.device_kind not in kinds:
        known = ", ".join(kinds) or "none"
        raise ValueError(
            f"expected a program for a GPU of a known kind ({known}), got {abstract.device_kind}; pass the device "
            "to pallas_kernels.dispatch.describe_gpu first"
        )
    capability = kinds[abstract.device_kind]
    return None if capability is None else TracedGPU(capability, abstract.num_cores)


def capability_of(device: jax.Device) -> Capability | None:
    """Returns the compute capability of an NVIDIA GPU; None for any other device."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    # For an AMD GPU this is a name, like "gfx90a".
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def platform_of(device: jax.Device) -> str:
    """Returns the platform for which programs of a device are lowered; jax calls those of two vendors "gpu" alike."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if capability_of(device) is None else "cuda"


def resolve(implementation: str, device: jax.Device) -> str:
    """Returns `implementation`, but replaces "auto" by "reference" for a device on which no kernels run.

    So kernels that would not run on the device are not traced.
    """
    has_kernels = any(backend.platform == platform_of(device) for backend in BACKENDS)
    return "reference" if implementation == "auto" and not has_kernels else implementation


def describe(implementation: str, device: jax.Device) -> str:
    """Returns a text that says which implementation `dispatch` runs on a device, and why.

    With "auto", a call that a kernel does not support runs the reference on every device.
    """
    capability = capability_of(device)
    name = device.device_kind + (f", compute capability {'.'.join(map(str, capability))}" if capability else "")
    if implementation == "reference":
        return f'references on {name}: asked for by implementation="reference"'
    if implementation == "pallas":
        how = "interpreted " if device.platform == "cpu" else ""
        return f'Pallas kernels {how}on {name}: asked for by implementation="pallas"'
    if capability:
        return f"Pallas kernels on {name}: an NVIDIA GPU"
    return f"references on {name}: not an NVIDIA GPU"
