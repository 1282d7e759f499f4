"""Reads requests: the tables of their fields, messages, and the forms of other APIs."""
