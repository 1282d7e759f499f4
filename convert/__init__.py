"""Reads Hugging Face folders and the hub, and reads and writes orbax folders; knows tensor names but no models."""
