"""Reads answers while they arrive: text, reasoning, blocks, log-probabilities, rounds."""
