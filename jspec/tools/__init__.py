"""What is built on the engine: command line, bench, demo, checks of heads, pictures."""
