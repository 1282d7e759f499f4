"""How many programs the engines of a test file may have in the default run (`tests/support/costs.py`).

Tracing, lowering and compiling a program takes about a second, unless an engine of `tests/support/engines.py` in the
same process has it. What the engines cost that several files share is counted apart.
"""

USUAL = 6
BUDGETS: dict[str, int] = {}
