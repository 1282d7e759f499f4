"""From logits to tokens: penalties, grammar masks, logits processors, sampling, log-probabilities."""
