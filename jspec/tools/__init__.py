"""Tools that use the engine: command line, benchmarks, demo, checks of draft heads, figures."""
