"""The routes, and what those that generate share."""
