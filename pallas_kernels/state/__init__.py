"""Gathers and scatters rows of per-slot state."""
