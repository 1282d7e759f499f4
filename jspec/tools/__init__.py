"""Tools that use the engine: command line, bench, demo, checks of draft heads, figures."""
