"""Oracles: the same formulas in plain numpy, computed by other means than the code under test."""
