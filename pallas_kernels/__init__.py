"""GPU kernels for operations that XLA compiles to slower code. Each kernel has a reference in jax.numpy."""

from pallas_kernels.attention.ancestor_bits import ancestor_bits
from pallas_kernels.attention.append_attention import append_attention
from pallas_kernels.attention.head_products import head_products
from pallas_kernels.attention.interval_attention import interval_attention, interval_attention_gradient
from pallas_kernels.attention.kv_pages import append, move_rows
from pallas_kernels.attention.latent import append_latent
from pallas_kernels.attention.paged_attention import paged_attention
from pallas_kernels.attention.prompt_attention import prompt_attention
from pallas_kernels.attention.rope_append import HeadTransform, rotate_append
from pallas_kernels.attention.rotate_queries import rotate_queries
from pallas_kernels.layers.dense.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.gated_matmul import gated_matmul
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.quantize_rows import quantize_rows
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.split_matmul import split_matmul
from pallas_kernels.sampling.sample_tokens import sample_tokens
from pallas_kernels.sampling.threshold import sampling_threshold
from pallas_kernels.sampling.top_log_probs import top_log_probs
from pallas_kernels.state.gather_rows import gather_rows

__all__ = [
    "HeadTransform",
    "add_rms_norm",
    "ancestor_bits",
    "append",
    "append_attention",
    "append_latent",
    "deterministic_matmul",
    "gated_matmul",
    "gather_rows",
    "head_products",
    "interval_attention",
    "interval_attention_gradient",
    "move_rows",
    "norm_columns",
    "paged_attention",
    "prompt_attention",
    "quantize_rows",
    "rotate_append",
    "rotate_queries",
    "sample_tokens",
    "sampling_threshold",
    "split_matmul",
    "top_log_probs",
]
