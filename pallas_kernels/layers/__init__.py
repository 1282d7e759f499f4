"""Matrix products and norms of a decoder layer."""
