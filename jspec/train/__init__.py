"""Training of draft heads: `fit` trains a head for a target; `TrainConfig` has its options.

`HeadTrainer` trains a head between the rollouts of reinforcement learning, for a target that changes.

Trainers of targets find `log_probs` here, and the options to compile it with.

Names are imported when they are first used, so that the options can be read without the optimiser.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.train.config import TrainConfig
    from jspec.train.online import HeadTrainer, HeadUpdate
    from jspec.train.run import Result, fit
    from jspec.train.scoring import OPTIONS, log_probs

MODULES = {
    "HeadTrainer": "jspec.train.online",
    "HeadUpdate": "jspec.train.online",
    "OPTIONS": "jspec.train.scoring",
    "Result": "jspec.train.run",
    "TrainConfig": "jspec.train.config",
    "fit": "jspec.train.run",
    "log_probs": "jspec.train.scoring",
}

__all__ = ["OPTIONS", "HeadTrainer", "HeadUpdate", "Result", "TrainConfig", "fit", "log_probs"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in MODULES:
        raise AttributeError(f"module 'jspec.train' has no attribute {name!r}")
    value = getattr(import_module(MODULES[name]), name)
    globals()[name] = value
    return value
