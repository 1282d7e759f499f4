"""Computes on the host which tokens a grammar allows after a text."""
