"""The accept rules, one per file; `rules.py` finds a rule by its name and applies it."""

from jspec.core.accept_rule import AcceptRule
from jspec.verify.block import Block
from jspec.verify.coupled import Coupled
from jspec.verify.multi_candidate import Candidate, MultiCandidate, multi_candidate
from jspec.verify.rejection import Rejection
from jspec.verify.rules import accept, cut, resolve, verdict_of
from jspec.verify.traversal import Traversal
from jspec.verify.typical import Typical

__all__ = [
    "AcceptRule",
    "Block",
    "Candidate",
    "Coupled",
    "MultiCandidate",
    "Rejection",
    "Traversal",
    "Typical",
    "accept",
    "cut",
    "multi_candidate",
    "resolve",
    "verdict_of",
]
