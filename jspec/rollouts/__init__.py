"""Engines as the rollout workers of trainers for reinforcement learning; a file for a trainer needs its library."""
