"""Grammars on the host: what may follow a text."""
