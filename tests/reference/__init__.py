"""Oracles: the formulas again, in plain numpy and by other means than the code under test."""
