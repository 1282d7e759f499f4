"""Weights of four bits (`int4`), and the Hopper kernel of weights of four or eight bits, of which experts use parts."""
