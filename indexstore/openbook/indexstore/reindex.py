"""A new index over an old context, from what is stored: no model is run.

Owns the copy of a context into a draft with rebuilt heads. It knows nothing of how the draft
takes the old one's place (store.replace).

Keys, values, window, tokens and probes stay bit for bit, keys and values in the order of the new
clusters, so answers that read every key stay the same but for the order of sums. The metric of the
clusters is that of the stored training queries, a sample of those of the ingest; the plan is tuned
on the stored probes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.build import IndexParams, build_head, build_heads
from openbook.indexstore.draft import Draft
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.errors import OperationCancelled, ShardCorrupt
from openbook.indexstore.head import DEFAULT_KEYS, HeadIndex, HeadPlan
from openbook.indexstore.held import hold
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.layout import Kind
from openbook.indexstore.lift import lift_plan
from openbook.indexstore.manifest import Manifest, ManifestFields
from openbook.indexstore.plan import tune_plan, untuned_plan

TILE_BYTES_MAX = 4 << 20  # of scores at once; sorting them takes three times as much


def reindex(
    path: Path,
    draft: Draft,
    params: IndexParams,
    *,
    threads: int = 1,
    is_cancelled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Manifest:
    """Write the context at `path` into an empty draft, its heads indexed anew, and seal it.

    The id and the time of its making are kept; how each head finds its keys, the lift of the
    estimate, the index fingerprint and the seconds of the build are new, and a context of an older
    format becomes one of the newest. A graph is not built again: heads are searched by their
    clusters from then on. `is_cancelled` is asked before each head. One layer is in
    memory at a time.

    Raises OperationCancelled (the draft is then the caller's to discard), what open_context raises
    about the old context, and what Draft.write_layer and seal raise about the new one.
    """

    def rebuilt(file: str, records: LayerRecords, head: int) -> HeadIndex:
        if is_cancelled():
            raise OperationCancelled
        old = records.heads[head]
        queries = np.ascontiguousarray(records.train_queries[head], np.float32)  # (s, d)
        keys, values = old.in_text_order(old.keys), old.in_text_order(old.values)
        try:
            return build_head(keys, values, queries, None, params=params)
        except ValueError as error:  # numbers that no ingest stores, under right digests
            raise ShardCorrupt(file, f"head {head}: {error}") from error

    held = hold(path)
    try:
        held.check_sizes()
        tokens, *layers = held.manifest.files
        shard = held.shard(tokens, "full")
        ids = shard.read(Kind.TOKENS, None, check_digest=True)
        draft.write_tokens(ids, shard.read(Kind.OFFSETS, None, check_digest=True))
        build_s, plan = 0.0, []
        for layer, file in enumerate(layers):
            shard = held.shard(file, "full")
            records = held.records(shard, "full")
            started = clock()
            count = len(records.heads)
            heads = build_heads(partial(rebuilt, file.name, records), count, threads=threads)
            new = replace(records, heads=heads)
            scaling, tuned = held.manifest.scaling[layer], _tuned_plan(new, threads=threads)
            plan.append(lift_plan(tuned, new, scaling=scaling, threads=threads))
            build_s += clock() - started
            draft.write_layer(layer, new)
            shard.check()
            del shard, records, heads, new  # unmapped before the next one is read
        return draft.seal(replace(_fields(held.manifest, params, build_s), plan=tuple(plan)))
    finally:
        held.close()


def _tuned_plan(records: LayerRecords, *, threads: int) -> tuple[HeadPlan, ...]:
    """Return the plan of a layer, tuned on its stored probe queries."""
    plan, probes = tuple(untuned_plan() for _ in records.heads), records.probe_queries  # (q, p, d)
    if not plan or not probes.size:
        return plan
    wanted = [
        exact_neighbours(to_float32(head.keys), mine, min(DEFAULT_KEYS, head.middle_tokens))
        for head, mine in zip(
            records.heads,
            probes.reshape(len(plan), -1, probes.shape[2]),  # (KV heads, group · p, d)
            strict=True,
        )
    ]
    shaped = np.stack(wanted).reshape(*probes.shape[:2], -1)
    return tune_plan(plan, records.heads, probes, shaped, threads=threads)


def exact_neighbours(
    keys: NDArray[np.float32], queries: NDArray[np.float32], k: int
) -> NDArray[np.int32]:
    """Return the ids (s, k) of each query's k best keys by inner product, best first.

    keys (m, d), queries (s, d), k ≤ m. Among equal scores the lower id comes first. At most
    TILE_BYTES_MAX of scores exist at once (one query's row at least).
    """
    ids = np.empty((len(queries), k), np.int32)
    rows = max(1, TILE_BYTES_MAX // (4 * len(keys)))
    for start in range(0, len(queries), rows):
        scores = queries[start : start + rows] @ keys.T  # (rows, m)
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.lexsort((best, -np.take_along_axis(scores, best, axis=1)), axis=1)
        ids[start : start + rows] = np.take_along_axis(best, order, axis=1)
    return ids


def _fields(manifest: Manifest, params: IndexParams, build_s: float) -> ManifestFields:
    """Describe the same context with another index."""
    kept = {field.name: getattr(manifest, field.name) for field in fields(ManifestFields)}
    kept["index_fingerprint"] = params.fingerprint()
    kept["stages_s"] = replace(manifest.stages_s, build=build_s)
    return ManifestFields(**kept)
