"""Codes of 4 bits for two channels of a key: what a search reads in place of the key itself.

Owns the directions, the codewords and their training; the loops are in _build.pyx, a query's tables
and the lookups in codes.h. Coded is what a key differs from its cluster's centroid in,
so that score = query · centroid + query · difference, and the second term is one lookup per code
(product quantisation: Jégou et al., 2011). Differences are measured in the metric of the queries,
for what queries cannot tell apart needs no code, and turned to their principal directions; the
direction of the most variance shares a code with that of the least, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore import _build
from openbook.indexstore.clusters import Clusters

CODEWORDS = 16  # of a code: what 4 bits number, and what one register holds
SAMPLE = 2048  # differences that train the codewords; twice as many find no more
STEPS = 8  # of Lloyd's iteration; more of them change no recall


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of m keys of d channels: p = ⌈d / 2⌉ of them a key, r = ⌈p / 4⌉ rows a block."""

    codes: NDArray[np.uint8]  # (⌈m / 16⌉, r, 32), see codes.h
    codebook: NDArray[np.float32]  # (p, 16, 2) codewords
    basis: NDArray[np.float32]  # (2 p, d) turns a query to the directions of the codes
    spreads: NDArray[np.float32]  # (2 p,) how far the differences lie along them (codes.h)


def code_keys(
    keys: NDArray[np.float32],
    centroids: NDArray[np.float32],
    clusters: Clusters,
    metric: NDArray[np.float32],
    unit: float,
    *,
    seed: int,
) -> Codes:
    """Code what `keys` (m, d) differ from their `centroids` (c, d) in; deterministic for a seed.

    `metric` (d, d) is symmetric and invertible: distances are L2 after it, in `unit`s of a score
    (clusters.query_metric).
    """
    m, d = keys.shape
    pairs = -(-d // 2)
    rows = keys - centroids[clusters.cluster_of]  # (m, d)
    points = rows @ metric
    moment = points.T.astype(np.float64) @ points / m  # (d, d)
    variances, directions = np.linalg.eigh(moment)  # rising
    order = np.empty(d, np.intp)
    order[0::2] = np.arange(d)[::-1][: -(-d // 2)]
    order[1::2] = np.arange(d)[: d // 2]
    turn = directions[:, order]  # (d, d)
    turned = np.zeros((2 * pairs, m), np.float32)
    turned[:d] = turn.astype(np.float32).T @ points.T
    paired = turned.reshape(pairs, 2, m)
    basis = np.zeros((2 * pairs, d), np.float32)
    basis[:d] = np.linalg.solve(metric.astype(np.float64), turn).T
    sample = np.random.default_rng(seed).choice(m, min(m, SAMPLE), replace=False)
    codebook = train_codebook(np.ascontiguousarray(paired[:, :, np.sort(sample)]))
    spreads = np.zeros(2 * pairs, np.float32)
    shares = np.maximum(variances[order], 0) / max(
        float(variances.sum()), np.finfo(np.float32).tiny
    )
    spreads[:d] = np.sqrt(shares) / unit
    codes = _build.encode(paired, codebook)
    return Codes(codes, codebook, basis, spreads)


def train_codebook(pairs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return 16 codewords for each of p pairs of channels, (p, 16, 2), by k-means.

    `pairs` (p, 2, s) are s points. Codewords start at points evenly spaced along the first channel
    of the pair.
    """
    s = pairs.shape[2]
    at = (np.arange(CODEWORDS) * 2 + 1) * s // (2 * CODEWORDS)
    order = np.argsort(pairs[:, 0], axis=1, kind="stable")[:, None, at]  # (p, 1, 16)
    codebook = np.take_along_axis(pairs, order, axis=2).transpose(0, 2, 1)
    codebook = np.ascontiguousarray(codebook)
    _build.train(pairs, codebook, STEPS)
    return codebook
