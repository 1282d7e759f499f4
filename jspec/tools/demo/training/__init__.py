"""Trains a target that writes Python: `python -m jspec.tools.demo.training` (`__main__.py` has examples)."""
