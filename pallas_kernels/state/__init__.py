"""Gather and scatter of the rows of per-slot state."""
