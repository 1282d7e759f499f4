"""Matrix products, norms and quantisation of a decoder layer."""
