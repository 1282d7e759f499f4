"""Checks and fake drafters for your own drafters: `jspec.tools.testing` under its public name."""

from jspec.tools.testing import Random, Scripted, always_right, check_lossless

__all__ = ["Random", "Scripted", "always_right", "check_lossless"]
