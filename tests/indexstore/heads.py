"""Random heads for the index tests: keys with structure, queries off their distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32, to_stored
from openbook.indexstore.head import HeadIndex, KvDtype, Stored

Floats = NDArray[np.float32]


def exact_top(keys: Stored, queries: Floats, k: int) -> NDArray[np.int32]:
    """Return each query's best k keys by inner product, best first, the lower id on a tie."""
    scores = queries @ to_float32(keys).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)


def structured(rng: np.random.Generator, m: int, d: int) -> Floats:
    """Return keys (m, d) around a few directions, with a common offset, as attention keys have."""
    topics = rng.standard_normal((max(1, m // 40), d)).astype(np.float32) * 2
    noise = rng.standard_normal((m, d)).astype(np.float32)
    return topics[rng.integers(0, len(topics), m)] + noise + np.float32(1.5)


def prefill_queries(rng: np.random.Generator, keys: Floats, count: int) -> Floats:
    """Return queries (count, d) drawn towards keys but far from them: out of distribution."""
    chosen = keys[rng.integers(0, len(keys), count)] - keys.mean(axis=0)
    shift = rng.standard_normal(keys.shape[1]).astype(np.float32)
    noise = rng.standard_normal(chosen.shape).astype(np.float32)
    return (chosen + noise + 2 * shift).astype(np.float32)


def make_head(
    keys: Floats,
    *,
    seed: int = 0,
    kv_dtype: KvDtype = "float16",
    train: int = 400,
    params: IndexParams | None = None,
) -> HeadIndex:
    """Build the index of `keys` with random values and prefill-like training queries."""
    rng = np.random.default_rng(seed)
    stored = to_stored(keys, kv_dtype)
    values = to_stored(rng.standard_normal(keys.shape).astype(np.float32), kv_dtype)
    queries = prefill_queries(rng, keys, train) if train else np.zeros((0, keys.shape[1]), "f4")
    top = exact_top(stored, queries, min(100, len(keys)))
    return build_head(stored, values, queries, top, params=params or IndexParams())


def tie_aware_recall(keys: Stored, query: Floats, ids: NDArray[np.uint32], k: int) -> float:
    """Return the share of `ids` (k,) whose score is at least the k-th best, less 1e-6."""
    scores = to_float32(keys) @ query
    bar = np.sort(scores)[-k] - 1e-6
    return float((scores[ids] >= bar).sum() / k)
