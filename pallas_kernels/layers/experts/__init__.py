"""Kernels of the products of a mixture of experts, and of the choice of experts."""
