"""From logits to tokens: penalties, grammar masks, processors, sampling, log-probabilities."""
