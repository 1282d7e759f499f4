"""Training of draft heads: `fit` trains a head for a target; `TrainConfig` has its options."""

from jspec.train.config import TrainConfig
from jspec.train.run import Result, fit

__all__ = ["Result", "TrainConfig", "fit"]
