"""Engines as the rollout workers of trainers for reinforcement learning; each file needs its trainer's library."""
