"""Attention over a paged cache by its formula: one query at a time, in float64, without masks or jax."""

import numpy as np


def read_row(pool: np.ndarray, page_table: np.ndarray, sequence: int, row: int) -> np.ndarray:
    """Return the cache row `row` of a sequence [kv_heads, head_dim]."""
    page = pool.shape[2]
    return pool[page_table[sequence, row // page], :, row % page]


def ancestors(parents: np.ndarray, node: int) -> list[int]:
    """Return a node and all its ancestors, found by following the parents."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path


def attention(
    q, k_pool, v_pool, page_table, lengths, new_rows, *, start=0, window=None, scale=None, softcap=None, sinks=None
) -> np.ndarray:
    """Compute the softmax attention of every query over the cache rows it attends to.

    Args:
        q: queries [B, T, H, D]: sequences, queries, heads, head_dim.
        k_pool, v_pool: keys [pages, kv_heads, rows of a page, D] and values [pages, kv_heads, rows of a page, DV].
        page_table: page numbers of each sequence [B, P].
        lengths: committed rows of each sequence [B].
        new_rows: new_rows[b][t] lists the j for which query t of sequence b attends to row lengths[b] + j.
        start: first row that any query attends to.
        window: number of newest rows up to its own that a query attends to, out of the rows it would attend to without
            a window; the later rows are not counted.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: c, if a score x becomes c * tanh(x / c); None: scores are unchanged.
        sinks: score of one more row for each query head [H], whose value is 0; None: no such row.

    Returns:
        float64 [B, T, H, DV].
    """
    batch, queries, heads, dim = q.shape
    group = heads // k_pool.shape[1]
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((*q.shape[:3], v_pool.shape[3]), np.float64)
    for b in range(batch):
        for t in range(queries):
            new = [lengths[b] + j for j in sorted(new_rows[b][t])]
            seen = [*range(lengths[b]), *(row for row in new if row <= lengths[b] + t)]
            later = [row for row in new if row > lengths[b] + t]
            rows = [row for row in [*seen[-(window or len(seen)) :], *later] if row >= start]
            if not rows:
                continue
            keys = np.stack([read_row(k_pool, page_table, b, row) for row in rows]).astype(np.float64)
            values = np.stack([read_row(v_pool, page_table, b, row) for row in rows]).astype(np.float64)
            for h in range(heads):
                scores = keys[:, h // group] @ q[b, t, h].astype(np.float64) * scale
                scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
                if sinks is not None:
                    scores = np.append(scores, sinks[h])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[b, t, h] = weights[: len(rows)] @ values[:, h // group]
    return out
