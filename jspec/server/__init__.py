"""The HTTP server, over the public engine."""
