"""`jspec.tools.plot` under its public name: pictures of rounds, trees, acceptance, drafters and training."""

from jspec.tools.plot import acceptance, calibration, methods, rounds, training, tree

__all__ = ["acceptance", "calibration", "methods", "rounds", "training", "tree"]
