"""Reads answers while they arrive: reasoning in the formats of model families, and what reads tool calls."""
