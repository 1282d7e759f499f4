"""Requests in, text out; only model_runner.py names jax."""
