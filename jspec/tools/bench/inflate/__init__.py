"""A small trained model in a larger shape that computes the same."""
