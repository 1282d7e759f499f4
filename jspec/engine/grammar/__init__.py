"""Grammars on the host: which tokens may follow a text."""
