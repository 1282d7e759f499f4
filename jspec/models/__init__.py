"""The decoder and the configs that describe it."""
