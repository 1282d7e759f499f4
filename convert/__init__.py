"""Reads Hugging Face folders and the hub, and reads and writes orbax folders; knows tensors but no models."""
