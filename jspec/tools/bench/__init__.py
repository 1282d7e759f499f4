"""`jspec bench`: eight commands, declared in `cli`."""
