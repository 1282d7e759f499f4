"""The four-bit weights of `int4`, and the Hopper kernel of products with them, of which experts use parts."""
