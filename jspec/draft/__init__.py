"""Drafters, one a file; base.py is the interface."""
