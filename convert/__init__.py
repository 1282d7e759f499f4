"""Reads and writes checkpoints: Hugging Face folders, orbax folders, the hub. It knows bytes and names, not models."""
