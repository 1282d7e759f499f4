"""The compiled device programs: a decoding step and a prefill chunk."""
