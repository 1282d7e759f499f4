"""Kernel that gathers rows of arrays with one row per slot."""
