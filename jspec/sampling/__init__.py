"""Turns logits into tokens: penalties, grammar masks, logits processors, sampling and log-probabilities."""
