"""Kernels for the matrix products, the norms and the quantisation of a decoder layer."""
