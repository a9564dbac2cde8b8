"""The benchmark's modules are scripts beside each other: make them importable, and a file for them.

Owns random vectors in the benchmark's layout. The first run compiles the benchmark's loops.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
with warnings.catch_warnings():  # those of the libraries' own loading
    warnings.simplefilter("ignore")
    for name in ("faiss", "hnswlib", "usearch.index"):
        if importlib.util.find_spec(name.split(".")[0]):
            importlib.import_module(name)

from pairs import Pair, read_pairs  # noqa: E402  the path was not there before

KEYS, TOKENS, WIDTH, GROUP, TESTS, TRAINING = 2000, 2640, 32, 3, 6, 400


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads of random vectors with some structure, in a file."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for pair in range(2):
        centres = rng.normal(size=(60, WIDTH))
        keys = centres[rng.integers(60, size=KEYS)] + rng.normal(size=(KEYS, WIDTH)) * 0.7
        arrays[f"keys{pair}"] = keys.astype(np.float16)
        arrays[f"values{pair}"] = rng.normal(size=(KEYS, WIDTH)).astype(np.float16)
        for part, count in (("train", TRAINING), ("test", TESTS)):
            queries = rng.normal(size=(GROUP, count, WIDTH)) * 2 + 0.5
            arrays[f"{part}_queries{pair}"] = queries.astype(np.float16)
        positions = [rng.choice(TOKENS, TRAINING, replace=False) for _ in range(GROUP)]
        arrays[f"train_positions{pair}"] = np.array(positions, np.int32)
        arrays[f"test_positions{pair}"] = np.arange(TOKENS - TESTS, TOKENS, dtype=np.int32)
    heads = [{"layer": layer, "kv_head": 0} for layer in range(2)]
    info = {"tokens": TOKENS, "head_dim": WIDTH, "rope_theta": 1e4, "pairs": heads}
    path = tmp_path_factory.mktemp("vectors") / "qkv.npz"
    np.savez(path, info=json.dumps(info), **arrays)
    return path


@pytest.fixture(scope="session")
def pairs(vectors: Path) -> list[Pair]:
    """The two heads, indexed."""
    return read_pairs(vectors, chosen=None, queries=TESTS)
