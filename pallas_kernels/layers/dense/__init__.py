"""Kernels of products with one weight."""
