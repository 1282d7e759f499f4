"""Pictures of rounds, trees and acceptance: `jspec.tools.plot` under its public name."""

from jspec.tools.plot import acceptance, calibration, rounds, tree

__all__ = ["acceptance", "calibration", "rounds", "tree"]
