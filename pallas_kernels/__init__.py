"""What XLA does not do fast enough, each as a reference written from the formula and a GPU kernel."""

from pallas_kernels.ancestor_bits import ancestor_bits, causal_bits
from pallas_kernels.append_attention import append_attention
from pallas_kernels.fixed_matmul import fixed_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.keep_bound import keep_bound
from pallas_kernels.kv_pages import append, move_rows
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.put_rows import put_rows
from pallas_kernels.residual_norm import add_rms_norm
from pallas_kernels.rotary import rotate_append
from pallas_kernels.round_rows import round_rows
from pallas_kernels.sample_tokens import sample_tokens
from pallas_kernels.split_matmul import split_matmul
from pallas_kernels.take_rows import take_rows
from pallas_kernels.top_log_probs import top_log_probs

__all__ = [
    "add_rms_norm",
    "ancestor_bits",
    "append",
    "append_attention",
    "causal_bits",
    "fixed_matmul",
    "gated_matmul",
    "keep_bound",
    "move_rows",
    "paged_attention",
    "put_rows",
    "rotate_append",
    "round_rows",
    "sample_tokens",
    "split_matmul",
    "take_rows",
    "top_log_probs",
]
