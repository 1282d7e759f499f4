"""`jspec.tools.testing` under its public name: `check_lossless` and drafters for tests."""

from jspec.tools.testing import Difference, Random, Scripted, check_lossless, differences

__all__ = ["Difference", "Random", "Scripted", "check_lossless", "differences"]
