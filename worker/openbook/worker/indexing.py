"""A layer's index from what its attention handed over: keys, values and queries to records.

Owns which queries of a layer train its index, which are stored, and which tune its plan. It knows
nothing of files, nor of the order in which layers come.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.indexstore.attend import attend
from openbook.indexstore.build import IndexParams, build_head, build_heads
from openbook.indexstore.dtypes import fits, to_float32, to_stored
from openbook.indexstore.head import (
    DEFAULT_KEYS,
    EXACT,
    AttendRequest,
    HeadIndex,
    HeadPlan,
    LayerIndex,
    PlanKind,
    Stored,
)
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.plan import tune_plan, untuned_plan
from openbook.worker.capture import (
    DECODE_SPREAD,
    NEIGHBOURS,
    exact_top_k,
    probe_positions,
    rotated_queries,
    sample_positions,
)
from openbook.worker.models import Rotation
from openbook.worker.prefill import CapturedLayer
from openbook.worker.window import middle_range, window_positions

PROBES = 4  # queries per head whose exact answers are stored, for the lift and a later check
TUNING_QUERIES = 32  # per query head, of those that trained nothing
STORED_QUERIES_MAX = 1024  # training queries kept per KV head: an index can be rebuilt from them


def layer_records(
    captured: CapturedLayer,
    keys: Stored,
    values: Stored,
    *,
    params: IndexParams,
    has_graph: bool,
    turn: Rotation | None,
    threads: int,
) -> LayerRecords:
    """Build everything the store keeps of a layer.

    `keys` (KV heads, n, d) and `values` (KV heads, n, dv) as stored. `has_graph`: with what a
    scan and a walk read as well. Without a middle there are no heads, training queries or probes.
    """
    query_heads, token_count, head_dim = captured.q.shape
    kv_heads, _, value_dim = values.shape
    window, middle = window_positions(token_count), middle_range(token_count)
    records = {
        "window_keys": np.ascontiguousarray(keys[:, window]),
        "window_values": np.ascontiguousarray(values[:, window]),
    }
    if not middle:
        return LayerRecords(
            heads=(),
            train_queries=np.zeros((kv_heads, 0, head_dim), np.float16),
            train_positions=np.zeros((kv_heads, 0), np.int32),
            probe_queries=np.zeros((query_heads, 0, head_dim), np.float32),
            probe_out=np.zeros((query_heads, 0, value_dim), np.float32),
            probe_lse=np.zeros((query_heads, 0), np.float32),
            **records,
        )
    positions = sample_positions(token_count)  # (s,)
    # (query heads, s, d)
    queries = rotated_queries(captured.q, positions, turn, spread=DECODE_SPREAD)
    span = slice(middle.start, middle.stop)
    grouped = queries.view(kv_heads, -1, head_dim)  # (KV heads, group·s, d)
    count = min(NEIGHBOURS, len(middle)) if has_graph else None
    heads = _heads(
        keys[:, span], values[:, span], grouped, params=params, neighbours=count, threads=threads
    )
    probes = probe_positions(token_count, PROBES)
    probe_queries = rotated_queries(captured.q, probes, turn, spread=DECODE_SPREAD).cpu().numpy()
    plan = tuple(untuned_plan() for _ in heads)
    request = AttendRequest(LayerIndex(heads, plan), probe_queries, captured.scaling, EXACT)
    (answer,) = attend([request], threads=threads)
    train_queries, train_positions = _kept_queries(grouped, positions)
    return LayerRecords(
        heads=heads,
        train_queries=train_queries,
        train_positions=train_positions,
        probe_queries=probe_queries,
        probe_out=answer.out,
        probe_lse=answer.lse,
        **records,
    )


def layer_plan(
    captured: CapturedLayer,
    heads: tuple[HeadIndex, ...],
    *,
    forced: PlanKind | None,
    turn: Rotation | None,
    threads: int,
) -> tuple[HeadPlan, ...]:
    """Choose how each KV head of a layer finds its keys; `forced` is for measurement."""
    plan = tuple(untuned_plan(forced or "clusters") for _ in heads)
    if not heads or forced == "scan":
        return plan
    _, token_count, head_dim = captured.q.shape
    positions = probe_positions(token_count, TUNING_QUERIES)
    queries = rotated_queries(captured.q, positions, turn, spread=DECODE_SPREAD)  # (…, p, d)
    grouped = queries.view(len(heads), -1, head_dim)
    wanted = [
        exact_top_k(
            mine,
            torch.from_numpy(to_float32(head.keys)).to(mine.device),
            min(DEFAULT_KEYS, head.middle_tokens),
        )
        for head, mine in zip(heads, grouped, strict=True)
    ]
    return tune_plan(
        plan,
        heads,
        queries.cpu().numpy(),
        np.stack(wanted).reshape(*queries.shape[:2], -1),
        threads=threads,
    )


def _heads(
    keys: Stored,
    values: Stored,
    grouped: Tensor,
    *,
    params: IndexParams,
    neighbours: int | None,
    threads: int,
) -> tuple[HeadIndex, ...]:
    """Index every KV head's middle (KV heads, m, d) with the queries of all its query heads.

    With a graph if a number of `neighbours` is given: the best keys of each query that it is made
    of.
    """
    # One after the other: torch has all cores in each, and one tile is in memory, not one a head.
    wanted = [
        None
        if neighbours is None
        else exact_top_k(queries, torch.from_numpy(to_float32(rows)).to(queries.device), neighbours)
        for rows, queries in zip(keys, grouped, strict=True)
    ]

    def build(head: int) -> HeadIndex:
        return build_head(
            np.ascontiguousarray(keys[head]),
            np.ascontiguousarray(values[head]),
            grouped[head].cpu().numpy(),
            wanted[head],
            params=params,
        )

    return build_heads(build, len(wanted), threads=threads)


def _kept_queries(
    grouped: Tensor, positions: NDArray[np.int64]
) -> tuple[Stored, NDArray[np.int32]]:
    """Choose evenly what the store keeps of the training queries (KV heads, group·s, d)."""
    kv_heads, count, _ = grouped.shape
    kept_count = min(count, STORED_QUERIES_MAX)
    chosen = np.arange(kept_count) * count // max(1, kept_count)
    kept = grouped[:, torch.from_numpy(chosen).to(grouped.device)].cpu().numpy()
    where = positions[chosen % len(positions)].astype(np.int32)
    stored = to_stored(kept, "float16" if fits(kept, "float16") else "float32")
    return stored, np.ascontiguousarray(np.broadcast_to(where, (kv_heads, len(where))))
