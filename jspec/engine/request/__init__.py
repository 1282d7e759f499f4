"""A request: its options, its progress and what is measured of it."""
