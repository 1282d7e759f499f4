"""`jspec bench`: what a round costs, beside the least it could cost."""
