"""The plain twin of the search by clusters and of the encoding: what they must equal to the bit.

Owns no speed. The kernels' floats are sums in one fixed order, which `dot` repeats, so that the
integers they are cut to, and with them every id, are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import HeadIndex

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]
TABLE_MAX, SUM_MAX, BASE_MIN, ENOUGH = 63, 16128, -16000, 2


def dot(rows: Floats, vector: Floats) -> Floats:
    """Return rows (n, d) · vector (d,), each sum in the kernels' order: eight lanes, then those."""
    products = rows * vector
    whole = products.shape[1] // 8 * 8
    lanes = np.zeros((len(rows), 8), np.float32)
    for j in range(0, whole, 8):
        lanes += products[:, j : j + 8]
    total = (lanes[:, 0] + lanes[:, 4]) + (lanes[:, 1] + lanes[:, 5])
    total = total + ((lanes[:, 2] + lanes[:, 6]) + (lanes[:, 3] + lanes[:, 7]))
    for j in range(whole, products.shape[1]):
        total = total + products[:, j]
    return total


def cells_of(pairs: Floats, words: Floats) -> NDArray[np.intp]:
    """Return which of codewords (16, 2) is nearest to each of points (2, s)."""
    affinity = pairs[0, :, None] * words[:, 0] + pairs[1, :, None] * words[:, 1]
    affinity -= (words * words).sum(axis=1) / np.float32(2)
    return np.asarray(affinity.argmax(axis=1), np.intp)


def train(pairs: Floats, codebook: Floats, steps: int) -> Floats:
    """Twin of _build.train, which writes in place what this returns."""
    trained = codebook.copy()
    for mine, words in zip(pairs, trained, strict=True):
        for _ in range(steps):
            cells = cells_of(mine, words)
            held = np.bincount(cells, minlength=16)
            sums = [np.bincount(cells, channel, 16) for channel in mine]  # (2, 16) in float64
            means = (np.stack(sums, axis=1) / np.maximum(held, 1)[:, None]).astype(np.float32)
            words[held > 0] = means[held > 0]
    return trained


def encode(pairs: Floats, codebook: Floats) -> NDArray[np.uint8]:
    """Return the codes of points (p, 2, m) in blocks (⌈m / 16⌉, ⌈p / 4⌉, 32): see codes.h."""
    p, _, m = pairs.shape
    blocks = np.zeros((-(-m // 16), -(-p // 4), 32), np.uint8)
    for j, words in enumerate(codebook):
        for i, code in enumerate(cells_of(pairs[j], words)):
            blocks[i // 16, j // 4, i % 16 + 16 * (j % 2)] |= int(code) << (4 * (j % 4 // 2))
    return blocks


def decode(head: HeadIndex) -> NDArray[np.intp]:
    """Return the codes of each key (m, p): the inverse of `encode`'s packing."""
    pairs = len(head.array("codebook"))
    at, j = np.arange(len(head.keys))[:, None], np.arange(pairs)[None]
    packed = head.array("codes")[at // 16, j // 4, at % 16 + 16 * (j % 2)]
    codes: NDArray[np.intp] = (packed >> (4 * (j % 4 // 2))) & 15
    return codes


def levels(
    head: HeadIndex, query: Floats, scaling: np.float32, reach: np.float32
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return what one query makes of a head: tables (p, 16), bases (c,) and bounds (c,)."""
    pairs = len(head.array("codebook"))
    logits = scaling * dot(to_float32(head.centroids), query)
    turned = scaling * dot(head.array("code_basis"), query)
    wide = np.float32(0)
    for each in turned * head.array("code_spreads"):
        wide += each * each
    wide = np.sqrt(wide)
    x, y = head.array("codebook")[:, :, 0], head.array("codebook")[:, :, 1]
    raw = turned[0::2, None] * x + turned[1::2, None] * y  # (p, 16)
    low, high = raw.min(axis=1), raw.max(axis=1)
    zero = np.float32(0)
    for each in low:
        zero -= each
    most = np.float32(min(TABLE_MAX, SUM_MAX // (4 * -(-pairs // 4))))
    span = logits.max() - logits.min()
    widest = max((high - low).max() / most, span / np.float32(-BASE_MIN))
    inverse = np.float32(1) / widest if widest > 0 else np.float32(0)
    tables = np.trunc((raw - low[:, None]) * inverse + np.float32(0.5)).astype(np.int64)
    base = (logits - logits.max()) * inverse
    bound = base + (zero * inverse + reach * wide * inverse * head.spreads)
    bases = np.trunc(np.maximum(base, np.float32(BASE_MIN))).astype(np.int64)
    return tables, bases, np.trunc(np.clip(bound, -32767, 32767)).astype(np.int64)


def probe(
    head: HeadIndex, queries: Floats, scaling: float, *, candidates: int, reach: float
) -> tuple[list[Ids], int]:
    """Return the candidates of each query head, best first, and the number of keys scored."""
    m = len(head.keys)
    capacity = min(m, candidates)
    made = [levels(head, query, np.float32(scaling), np.float32(reach)) for query in queries]
    codes, of = decode(head), head.cluster_of
    sums = []
    for tables, bases, _ in made:
        looked_up = sum(tables[j, codes[:, j]] for j in range(codes.shape[1]))
        sums.append(bases[of] + looked_up)  # (m,)
    blocks, best, looked_at = np.arange(m) // 16, [], np.zeros(m, bool)
    for (_, bases, bounds), row in zip(made, sums, strict=True):
        bins = -bases >> 4
        held = np.bincount(bins, weights=head.counts, minlength=1001).cumsum()
        enough = np.flatnonzero(held >= ENOUGH * capacity)
        chosen = bins <= (enough[0] if len(enough) else 1000)
        seen = np.isin(blocks, blocks[chosen[of]])
        found = np.sort(row[seen])[::-1]
        bar = found[capacity - 1] if len(found) >= capacity else -32767
        chosen |= bounds >= bar
        seen = np.isin(blocks, blocks[chosen[of]])
        ids = np.flatnonzero(seen)
        best.append(ids[np.lexsort((ids, -row[seen]))[:capacity]])
        looked_at |= seen
    return best, int(looked_at.sum())
