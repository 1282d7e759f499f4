"""Trains the target of the embedded pair: `python -m jspec.tools.demo.training` (`__main__.py` has an example)."""
