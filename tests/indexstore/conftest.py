"""Small contexts made of random arrays, and the ways to damage and forge one.

Owns nothing of the product. Also run as a script's import by store_process.py.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from shimmed import Shimmed

from openbook.indexstore.dtypes import to_stored
from openbook.indexstore.head import HeadIndex, HeadPlan
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.layout import code_sizes
from openbook.indexstore.manifest import CHUNK_BYTES, ManifestFields, StageSeconds
from openbook.indexstore.store import Draft, begin, publish

MODEL = "sha256:model-a"
CONTEXT_ID = "0123456789abcdef0123456789abcdef"
DEGREE = 8
TRAIN = 5
PROBES = 2


PLAN = (HeadPlan("clusters", 200, reach=2.0), HeadPlan("graph", 64))


class Maker:
    """Makes contexts of two layers, four query heads and two KV heads under one root."""

    model = MODEL

    def __init__(self, root: Path) -> None:
        self.root = root

    def fields(self, tokens: int = 700, **changes: Any) -> ManifestFields:
        """Describe a context of `tokens` tokens."""
        fields = ManifestFields(
            context_id=CONTEXT_ID,
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
            plan=(PLAN if tokens > 640 else (),) * 2,
            created_unix_s=1_700_000_000,
            model_parts=(("prompt_layout", "chat"), ("weights", "0" * 64)),
            stages_s=StageSeconds(tokenize=0.5, prefill=1.5, build=2.0, write=0.25),
            kv_bytes_16bit=2 * 2 * tokens * (16 + 24) * 2,
        )
        return replace(fields, **changes)

    def head(self, rng: np.random.Generator, fields: ManifestFields) -> HeadIndex:
        """Return random arrays of the right shapes, every id in range: no index, but storable."""
        middle, d, dv = fields.middle_tokens, fields.head_dim, fields.value_dim
        clusters, sizes = max(1, middle // 16), code_sizes(middle, d)
        cluster_of = np.sort(rng.integers(0, clusters, middle, dtype=np.uint32))
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
            spreads=rng.random(clusters, np.float32),
            members=rng.permutation(middle).astype(np.uint32),
            codes=rng.integers(0, 256, (sizes["blocks"], sizes["rows"], 32), dtype=np.uint8),
            codebook=rng.standard_normal((sizes["pairs"], 16, 2), np.float32),
            code_basis=rng.standard_normal((sizes["directions"], d), np.float32),
            code_spreads=rng.random(sizes["directions"], np.float32),
        )

    def layer(self, seed: int, fields: ManifestFields) -> LayerRecords:
        """Return one layer of random arrays."""
        rng = np.random.default_rng(seed)
        window = fields.token_count - fields.middle_tokens
        heads = fields.kv_heads if fields.middle_tokens else 0
        d, dv, kv, q = fields.head_dim, fields.value_dim, fields.kv_heads, fields.query_heads
        keys = rng.standard_normal((kv, window, d), np.float32)
        values = rng.standard_normal((kv, window, dv), np.float32)
        return LayerRecords(
            heads=tuple(self.head(rng, fields) for _ in range(heads)),
            window_keys=to_stored(keys, fields.kv_dtype),
            window_values=to_stored(values, fields.kv_dtype),
            train_queries=rng.standard_normal((kv, TRAIN, d), np.float32).astype(np.float16),
            train_positions=rng.integers(0, fields.token_count, (kv, TRAIN), dtype=np.int32),
            probe_queries=rng.standard_normal((q, PROBES, d), np.float32),
            probe_out=rng.standard_normal((q, PROBES, dv), np.float32),
            probe_lse=rng.standard_normal((q, PROBES), np.float32),
        )

    def tokens(self, fields: ManifestFields) -> tuple[Any, Any]:
        """Return token ids and offsets."""
        starts = np.arange(fields.token_count, dtype=np.int32) * 4
        ids = np.arange(fields.token_count, dtype=np.int32) % 997
        return ids, np.stack([starts, starts + 4], axis=1)

    def draft(self, fields: ManifestFields, seed: int = 0) -> Draft:
        """Write and seal a random context."""
        draft = begin(self.root)
        draft.write_tokens(*self.tokens(fields))
        for layer in range(fields.layers):
            draft.write_layer(layer, self.layer(seed + layer, fields))
        draft.seal(fields)
        return draft

    def final(self, context_id: str = CONTEXT_ID) -> Path:
        """Return the place of a published context."""
        return self.root / "local" / context_id

    def context(self, tokens: int = 700, *, seed: int = 0, **changes: Any) -> Path:
        """Publish a random context and return its place."""
        fields = self.fields(tokens, **changes)
        path = self.final(fields.context_id)
        assert publish(self.draft(fields, seed), path)
        return path


class Forger:
    """Changes a sealed context and makes its digests right again, as a stranger could."""

    def manifest(self, path: Path, edit: Callable[[Any], None]) -> None:
        """Edit the parsed manifest and write it with a right digest of its own."""
        file = path / "manifest.json"
        raw = self.edited(file.read_bytes(), edit)
        file.unlink()
        file.write_bytes(raw)

    def edited(self, raw: bytes, edit: Callable[[Any], None]) -> bytes:
        """Return a manifest's file with its parsed JSON edited."""
        whole = json.loads(raw)
        del whole["sha256"]
        edit(whole)
        return self.digested(json.dumps(whole, sort_keys=True, separators=(",", ":")))

    def digested(self, text: str) -> bytes:
        """Return JSON text, whatever it is, as a manifest's file with a right digest."""
        body = text.removesuffix("}").encode()
        return body + f',"sha256":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()

    def records(self, path: Path, name: str, edit: Callable[[dict[bytes, bytes]], None]) -> None:
        """Edit the records of a file and rewrite it, with right digests of the file's chunks."""
        file = path / name
        with lmdb.open(str(file), subdir=False, lock=False, lib_version=0, map_size=1 << 28) as env:
            with env.begin() as txn:
                found = dict(txn.cursor())
            edit(found)
            with env.begin(write=True) as txn:
                for key, value in found.items():
                    txn.put(key, value)
        raw = file.read_bytes()
        chunks = [raw[i : i + CHUNK_BYTES] for i in range(0, len(raw), CHUNK_BYTES)]

        def reseal(whole: Any) -> None:
            entry = next(entry for entry in whole["files"] if entry["name"] == name)
            whole["fields"]["bytes_total"] += len(raw) - entry["bytes"]
            entry["bytes"] = len(raw)
            entry["chunks"] = [hashlib.sha256(chunk).hexdigest() for chunk in chunks]

        self.manifest(path, reseal)

    def record_digests(self, path: Path, name: str) -> None:
        """Make the digests of a file's records right too: only their contents are wrong then."""
        with (
            lmdb.open(
                str(path / name), subdir=False, lock=False, lib_version=0, readonly=True
            ) as env,
            env.begin() as txn,
        ):
            digests = {
                key.decode(): hashlib.sha256(value).hexdigest() for key, value in txn.cursor()
            }

        def reseal(whole: Any) -> None:
            for record in next(e for e in whole["files"] if e["name"] == name)["records"]:
                head = "" if record["head"] is None else f"/{record['head']:03d}"
                record["sha256"] = digests[record["kind"] + head]

        self.manifest(path, reseal)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes the file system fail (fault_shim.c)."""
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = Path(__file__).with_name("fault_shim.c")
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def shimmed(tmp_path: Path, shim: Path) -> Shimmed:
    (tmp_path / "stores").mkdir()
    return Shimmed(tmp_path / "stores", shim)


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


@pytest.fixture(scope="session")
def manifest_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The manifest's file of a context of 700 tokens."""
    return (Maker(tmp_path_factory.mktemp("sealed")).context() / "manifest.json").read_bytes()


@pytest.fixture
def forger() -> Forger:
    return Forger()


@pytest.fixture
def context(maker: Maker) -> Path:
    """A published context of 700 tokens: 60 of them in the middle."""
    return maker.context()
