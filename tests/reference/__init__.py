"""Oracles: the formulas in plain numpy, computed in another way than by the code under test."""
