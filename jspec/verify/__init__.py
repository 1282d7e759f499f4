"""Accept rules, one a file; `rules.py` chooses among them."""

from jspec.verify.multi_candidate import Candidate, multi_candidate
from jspec.verify.rules import accept, check_rule, cut, verdict_of
from jspec.verify.typical import Typical

__all__ = ["Candidate", "Typical", "accept", "check_rule", "cut", "multi_candidate", "verdict_of"]
