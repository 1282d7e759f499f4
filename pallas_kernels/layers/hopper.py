"""What the kernels for Hopper GPUs share: sizes of the GPU."""

from pallas_kernels.dispatch import HOPPER

HEIGHT = 64  # rows of the first operand of `wgmma`, per warpgroup
SHARED_BYTES = 227 * 1024 - 512  # shared memory of a CTA, without the barriers


def multiprocessors() -> int | None:
    """Returns the number of multiprocessors of the Hopper GPU that the program is traced for.

    The result is None if kernels for Hopper GPUs do not run there (`pallas_kernels.dispatch.HOPPER`).
    """
    gpu = HOPPER.gpu()
    return None if gpu is None else gpu.multiprocessors
