"""The host side of an engine: it takes requests and returns text. Only model_runner.py imports jax."""
