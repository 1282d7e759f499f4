"""How many programs the engines of a test file may lower in the default run (`tests/support/costs.py`).

Tracing, lowering and compiling a program takes about a second. What the named engines of `tests/support/engines.py`
compile is counted apart.
"""

USUAL = 6
BUDGETS: dict[str, int] = {}
