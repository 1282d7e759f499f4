"""The configs of layers and decoders, and what families read of config.json."""
