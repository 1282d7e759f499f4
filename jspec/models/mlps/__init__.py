"""The feed-forwards of layers: dense ones, mixtures of experts, shared experts."""
