"""Kernels that gather and scatter rows of arrays with one row per slot."""
