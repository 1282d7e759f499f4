"""The compiled device programs: a decoding step, a prefill chunk."""
