"""HTTP itself: errors, bodies, events, limits, counts and the live page."""
