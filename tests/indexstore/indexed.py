"""Contexts whose index is built and whose probes are answered, small enough for a test.

Owns nothing of the product; conftest.Maker's arrays are random, these fit each other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from conftest import Maker
from heads import prefill_queries, structured

from openbook.indexstore.attend import attend
from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.dtypes import to_float32, to_stored
from openbook.indexstore.head import EXACT, AttendRequest, HeadPlan, LayerIndex
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.manifest import ManifestFields

PARAMS = IndexParams(degree=8, keys_per_cluster=16)
SCALING = 0.25
PROBES = 3


class IndexedMaker(Maker):
    """Makes contexts with real indexes, and exact answers of the probes."""

    train = 300

    def fields(self, tokens: int = 1640, **changes: Any) -> ManifestFields:
        """Describe a context of `tokens` tokens, all of its heads searched by their clusters."""
        heads = changes.get("kv_heads", 2) if tokens > 640 else 0
        made = {
            "scaling": (SCALING, SCALING),
            "plan": ((HeadPlan("clusters", 200, reach=2.5),) * heads,) * 2,
            "index_fingerprint": PARAMS.fingerprint(),
        }
        return super().fields(tokens, **{**made, **changes})

    def layer(self, seed: int, fields: ManifestFields) -> LayerRecords:
        """Return one layer whose heads are indexed by its own training queries."""
        rng = np.random.default_rng(seed)
        m, d, dv = fields.middle_tokens, fields.head_dim, fields.value_dim
        heads, queries, probes = [], [], []
        group = fields.query_heads // fields.kv_heads
        for _ in range(fields.kv_heads):
            keys = structured(rng, m, d)
            stored = to_stored(keys, fields.kv_dtype)
            values = to_stored(rng.standard_normal((m, dv), np.float32), fields.kv_dtype)
            train = prefill_queries(rng, to_float32(stored), self.train).astype(np.float16)
            wide = train.astype(np.float32)
            heads.append(build_head(stored, values, wide, None, params=PARAMS))
            queries.append(train)
            asked = prefill_queries(rng, to_float32(stored), group * PROBES)
            probes.append(asked.reshape(group, PROBES, d))
        probe_queries = np.concatenate(probes)
        layer = LayerIndex(tuple(heads), (HeadPlan("clusters", 0),) * fields.kv_heads)
        (answer,) = attend([AttendRequest(layer, probe_queries, SCALING, EXACT)])
        places = rng.integers(0, fields.token_count, (fields.kv_heads, self.train), dtype=np.int32)
        return replace(
            super().layer(seed, fields),
            heads=tuple(heads),
            train_queries=np.stack(queries),
            train_positions=places,
            probe_queries=probe_queries,
            probe_out=answer.out,
            probe_lse=answer.lse,
        )

    def context(self, tokens: int = 1640, *, seed: int = 0, **changes: Any) -> Path:
        """Publish an indexed context and return its place."""
        return super().context(tokens, seed=seed, **changes)
