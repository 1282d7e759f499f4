"""Draft methods, one per file; base.py defines their interface."""
