"""What the kernels for Hopper GPUs share: sizes of the GPU, and where such a kernel runs."""

import re
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation, dispatch

HEIGHT = 64  # rows of the first operand of `wgmma`, per warpgroup
SHARED_BYTES = 227 * 1024 - 512  # shared memory of a CTA, without the barriers


def choose_compiled(implementation: Implementation, kernel: Callable, reference: Callable, *arguments: Any) -> Any:
    """Chooses as `dispatch` does, but a CPU always runs the reference, even with "pallas".

    jax can interpret a Mosaic GPU kernel only with special parameters and with side effects, which are not allowed in a
    branch of `platform_dependent`.
    """
    compiled: Implementation = "auto" if implementation == "pallas" else implementation
    return dispatch(compiled, None, kernel, reference, *arguments)


def multiprocessors() -> int | None:
    """Returns the number of multiprocessors of the Hopper GPU (compute capability 9.0) that the program is traced for.

    The result is None if the program is traced for another device, or if jax is older than 0.11.
    """
    if jax.__version_info__ < (0, 11):
        return None  # jax before 0.11 cannot compile a Mosaic GPU kernel on a machine without a GPU
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores if re.search(r"\bG?H\d+\b", device.device_kind) else None
    local = jax.local_devices()[0]
    return local.core_count if getattr(local, "compute_capability", None) == "9.0" else None
