"""Reads and writes checkpoints: Hugging Face folders, orbax folders, the hub. Knows bytes and names, no models."""
