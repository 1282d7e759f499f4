"""Reads Hugging Face folders and the hub, reads and writes orbax folders; knows tensors by name, but no model."""
