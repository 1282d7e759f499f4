"""Oracles: the formulas in plain numpy, computed in a different way from the code under test."""
