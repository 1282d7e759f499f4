"""Forms of answers: blocks, log-probabilities, rounds."""
