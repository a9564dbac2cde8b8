"""What a layer's queries teach an index: their metric, and which middle keys they want most.

Owns the choice of training and probe positions, the turning of queries to where decoding happens,
and the exact top-k by tiles on the model's device. It knows nothing of indexes or files.

A decode query sits after the document, a training query inside it, and RoPE makes q·k depend on
the distance: so every sampled query is first turned to a position where decoding happens. Not to
one position but spread over a range of them: heads that attend by position want other keys at
every step, and a graph trained for one step alone misses a quarter of the others' (docs/LOG.md).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.worker.models import Rotation, rotate

NEIGHBOURS = 100  # keys per training query of a graph; RoarGraph's N_q, and the paper's top-100
SAMPLE_MAX = 2048  # training queries per query head
SAMPLE_MIN = 256
SAMPLE_SHARE = 0.125  # of the positions, until SAMPLE_MAX
DECODE_SPREAD = 512  # training queries are turned to n ± this: question, answer and their start
GOLDEN = 0.6180339887498949  # multiples of it, modulo one, fill an interval evenly
TILE_BYTES_MAX = 12 << 20  # of scores at once; the memory promise counts on it


def sample_positions(token_count: int) -> NDArray[np.int64]:
    """Choose the training positions of a context: sorted, each once, denser towards the end.

    The density grows linearly with the position, because late queries look most like those of
    decoding, while a sample of the start alone ruins recall for late keys.
    """
    count = min(SAMPLE_MAX, max(SAMPLE_MIN, round(token_count * SAMPLE_SHARE)), token_count)
    quantiles = (np.arange(count) + 0.5) / count
    return np.unique((np.sqrt(quantiles) * token_count).astype(np.int64))


def probe_positions(token_count: int, count: int) -> NDArray[np.int64]:
    """Choose positions for probes, sorted: none that trains, denser towards the end like those.

    Neighbouring tokens want the same keys, and the last ones may be a heading or blank lines; so
    the probes are spread over the text. Fewer than `count` where the text has no more to give.
    """
    others = np.setdiff1d(np.arange(token_count), sample_positions(token_count))
    quantiles = (np.arange(count) + 0.5) / count
    return np.unique(others[(np.sqrt(quantiles) * len(others)).astype(np.int64)])


def rotated_queries(
    q: Tensor, positions: NDArray[np.int64], rotation: Rotation | None, *, spread: int = 0
) -> Tensor:
    """Take the queries at `positions` and turn each to a position within `spread` of n.

    n is the first position after the document. q (query heads, n, d) after RoPE. Returns float32
    (query heads, s, d) on q's device. Without a known rotation the queries stay as they are: the
    index is poorer, the answers as exact.
    """
    chosen = torch.from_numpy(positions).to(q.device)
    taken = q[:, chosen].float()
    offsets = np.floor((np.arange(len(positions)) * GOLDEN % 1 - 0.5) * 2 * spread)
    by = q.shape[1] - chosen + torch.from_numpy(offsets.astype(np.int64)).to(q.device)
    return taken if rotation is None else rotate(taken, rotation, by=by)


def exact_top_k(
    queries: Tensor, keys: Tensor, k: int, *, tile_bytes: int = TILE_BYTES_MAX
) -> NDArray[np.int32]:
    """Return the ids of each query's k best keys by inner product, best first: int32 (s, k).

    queries (s, d), keys (m, d) with the values as stored. Raises ValueError when k exceeds m. At
    most `tile_bytes` of scores exist at once (one query's row at least).
    """
    key_count = keys.shape[0]
    if k > key_count:
        raise ValueError(f"asked for the best {k} of {key_count} keys")
    ids = np.empty((queries.shape[0], k), dtype=np.int32)
    columns = keys.float().T  # (d, m)
    rows_max = max(1, tile_bytes // (4 * max(1, key_count)))
    for start in range(0, queries.shape[0], rows_max):
        rows = slice(start, start + rows_max)
        # The scores (rows, m) have no name: the last tile's would stay until the next is made.
        ids[rows] = (queries[rows].float() @ columns).topk(k, dim=1).indices.cpu().numpy()
    return ids
