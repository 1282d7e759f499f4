"""`jspec.tools.plot` under its public name: pictures of rounds, trees, acceptance and drafters."""

from jspec.tools.plot import acceptance, calibration, methods, rounds, tree

__all__ = ["acceptance", "calibration", "methods", "rounds", "tree"]
