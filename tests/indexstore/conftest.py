"""Small contexts made of random arrays, for the store's tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from openbook.indexstore.dtypes import to_stored
from openbook.indexstore.head import HeadIndex, HeadPlan
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.manifest import ManifestFields, StageSeconds
from openbook.indexstore.store import Draft, begin, publish

MODEL = "sha256:model-a"
DEGREE = 8
TRAIN = 5
PROBES = 2


def make_fields(tokens: int = 700, **changes: object) -> ManifestFields:
    """Describe a context of two layers, four query heads and two KV heads of size 16 and 24."""
    fields = ManifestFields(
        context_id="0123456789abcdef0123456789abcdef",
        model_fingerprint=MODEL,
        index_fingerprint="index-1",
        model_name="test/model",
        prompt_layout="completion",
        token_count=tokens,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        value_dim=24,
        kv_dtype="float16",
        scaling=(0.25, 0.5),
        plan=((HeadPlan("scan", 0), HeadPlan("graph", 64)) if tokens > 640 else (),) * 2,
        created_unix_s=1_700_000_000,
        stages_s=StageSeconds(tokenize=0.5, prefill=1.5, build=2.0, write=0.25),
        kv_bytes_16bit=2 * 2 * tokens * (16 + 24) * 2,
    )
    return replace(fields, **changes)  # type: ignore[arg-type]


def make_head(rng: np.random.Generator, middle: int, fields: ManifestFields) -> HeadIndex:
    """Return random arrays of the right shapes, every id in range; no search would like them."""
    clusters = max(1, middle // 16)
    d, dv = fields.head_dim, fields.value_dim
    cluster_of = rng.integers(0, clusters, middle, dtype=np.uint32)
    return HeadIndex(
        keys=to_stored(rng.standard_normal((middle, d), np.float32), fields.kv_dtype),
        values=to_stored(rng.standard_normal((middle, dv), np.float32), fields.kv_dtype),
        keys_int8=rng.integers(-127, 128, (middle, d), dtype=np.int8),
        centre=rng.standard_normal(d, np.float32),
        scale=rng.standard_normal(d, np.float32),
        graph=rng.integers(0, middle, (middle, DEGREE), dtype=np.uint32),
        entries=rng.integers(0, middle, clusters + 1, dtype=np.uint32),
        centroids=rng.standard_normal((clusters, d), np.float32),
        counts=np.bincount(cluster_of, minlength=clusters).astype(np.uint32),
        value_sums=rng.standard_normal((clusters, dv), np.float32),
        cluster_of=cluster_of,
    )


def make_layer(seed: int, fields: ManifestFields) -> LayerRecords:
    """Return one layer of random arrays for a context of `fields`."""
    rng = np.random.default_rng(seed)
    window = fields.token_count - fields.middle_tokens
    heads = fields.kv_heads if fields.middle_tokens else 0
    d, dv, kv, q = fields.head_dim, fields.value_dim, fields.kv_heads, fields.query_heads
    return LayerRecords(
        heads=tuple(make_head(rng, fields.middle_tokens, fields) for _ in range(heads)),
        window_keys=to_stored(rng.standard_normal((kv, window, d), np.float32), fields.kv_dtype),
        window_values=to_stored(rng.standard_normal((kv, window, dv), np.float32), fields.kv_dtype),
        train_queries=rng.standard_normal((kv, TRAIN, d), np.float32).astype(np.float16),
        train_positions=rng.integers(0, fields.token_count, (kv, TRAIN), dtype=np.int32),
        probe_queries=rng.standard_normal((q, PROBES, d), np.float32),
        probe_out=rng.standard_normal((q, PROBES, dv), np.float32),
        probe_lse=rng.standard_normal((q, PROBES), np.float32),
    )


def make_tokens(fields: ManifestFields) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and offsets of a context of `fields`."""
    n = fields.token_count
    starts = np.arange(n, dtype=np.int32) * 4
    return np.arange(n, dtype=np.int32) % 997, np.stack([starts, starts + 4], axis=1)


def write_draft(root: Path, fields: ManifestFields, seed: int = 0) -> Draft:
    """Write and seal a random context under `root`."""
    draft = begin(root)
    draft.write_tokens(*make_tokens(fields))
    for layer in range(fields.layers):
        draft.write_layer(layer, make_layer(seed + layer, fields))
    draft.seal(fields)
    return draft


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A published context of 700 tokens."""
    fields = make_fields()
    path = tmp_path / "local" / fields.context_id
    assert publish(write_draft(tmp_path, fields), path)
    return path
