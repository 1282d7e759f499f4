"""Numbers that host and device agree on: how prompts are cut into blocks of rows, and limits. Imports no jax."""

MAX_STOP_IDS = 8  # largest number of stop ids per row
NO_TOKEN = -1  # padding before a text's first token and after a path's last token; in a bad word it matches any token
UNLIMITED = 2**30  # a number of tokens that no request reaches

# Largest number of rows of a block of prompt tokens. It is larger than `append_attention.MOST_ROWS`, so that all blocks
# of a prefill write their cache rows in one kernel before another kernel reads them.
BLOCK = 16


def block_rows(size: int) -> tuple[int, int]:
    """Return the number of blocks of a prefill of ``size`` tokens, and the number of rows of a block."""
    rows = min(BLOCK, size)
    return -(-size // rows), rows


def padded(count: int, rows: int) -> int:
    """Return the number of rows of the blocks that hold ``count`` tokens, for blocks of ``rows`` rows."""
    return -(-count // rows) * rows
