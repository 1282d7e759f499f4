"""The parts of decoder layers that mix tokens, one file each: config, weights, state and computation."""
