"""Plain NumPy twins of what the worker computes with torch, for tests and for reading.

Owns the obvious way to do each sum, in float64, with no tiles and no tricks. Nothing of the
service calls it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.floating]


def attend(
    q: Float, k: Float, v: Float, *, scaling: float, past: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attend over one key set; return out (query heads, rows, dv) and lse (query heads, rows).

    q (query heads, rows, d), k (KV heads, keys, d), v (KV heads, keys, dv). With `past`, row i sees
    the first past + i + 1 keys and no others; without it, all.
    """
    query_heads, rows, _ = q.shape
    kv_heads, keys, value_dim = v.shape
    out = np.zeros((query_heads, rows, value_dim))
    lse = np.full((query_heads, rows), -np.inf)
    for head in range(query_heads):
        kv_head = head // (query_heads // kv_heads)
        for row in range(rows):
            seen = keys if past is None else past + row + 1
            if seen == 0:
                continue
            scores = k[kv_head, :seen].astype(np.float64) @ q[head, row].astype(np.float64)
            scores *= scaling  # (seen,)
            top = scores.max()
            weights = np.exp(scores - top)
            lse[head, row] = top + np.log(weights.sum())
            out[head, row] = weights @ v[kv_head, :seen].astype(np.float64) / weights.sum()
    return out, lse


def merge(outs: list[Float], lses: list[Float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Join attention over disjoint key sets; the twin of merge.merge."""
    top = np.max([lse.astype(np.float64) for lse in lses], axis=0)
    safe = np.where(np.isneginf(top), 0.0, top)
    weights = [np.exp(lse.astype(np.float64) - safe) for lse in lses]
    total = np.sum(weights, axis=0)
    out = np.sum([w[..., None] * o for w, o in zip(weights, outs, strict=True)], axis=0)
    nonzero = np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        return out / nonzero[..., None], safe + np.log(total)


def exact_top_k(queries: Float, keys: Float, k: int) -> NDArray[np.int32]:
    """Return (s, k) ids of the keys of largest inner product, best first."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T  # (s, m)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)


def rotate(q: Float, delta: NDArray[np.int64], inv_freq: Float) -> NDArray[np.float64]:
    """Turn q (rows, d), rotated for position t, into what it would be at t + delta.

    Half-split pairing: channel i turns with channel i + r / 2, where r = 2 · len(inv_freq) is the
    rotary size; channels from r on stay.
    """
    half = inv_freq.shape[0]
    angle = delta[:, None] * inv_freq[None].astype(np.float64)  # (rows, half)
    cos, sin = np.cos(angle), np.sin(angle)
    out = q.astype(np.float64).copy()
    low, high = out[:, :half].copy(), out[:, half : 2 * half].copy()
    out[:, :half] = low * cos - high * sin
    out[:, half : 2 * half] = high * cos + low * sin
    return out
