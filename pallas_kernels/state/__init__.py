"""Kernel that scatters rows of arrays with one row per slot."""
