"""Recurrent states of sequences, and the tokens that read and advance them."""
