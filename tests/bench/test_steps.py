"""A rival's step is attention over what it found, the rest estimated; and the whole bench runs.

Owns the comparison of steps with NumPy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contenders import Rival
from pairs import Floats, Pair
from paper import Paper
from retroinfer import RetroInfer, RetroStep
from roargraph import RoarGraph

from openbook.indexstore.reference import combine

BENCH = Path(__file__).resolve().parents[2] / "bench"


def attention(pair: Pair, queries: Floats, ids: np.ndarray) -> Floats:
    """Return exact attention of queries (G, d) to keys (r,) of a pair."""
    logits = queries @ pair.wide[ids].T * pair.scaling
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    values = pair.head.values[ids].astype(np.float32)
    out: Floats = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


def rival(pair: Pair, index: RoarGraph | Paper) -> Rival:
    index.build(pair.wide, pair.training)
    one = Rival(pair, index, width=100, setting="", build_s=0)
    one.prepare()
    return one


def test_a_group_attends_to_the_union_of_what_it_found(pairs: list[Pair]) -> None:
    queries = pairs[0].tests[0]
    one = rival(pairs[0], RoarGraph(centred=True))
    found, ids = one.step(queries, estimate=False), one.search(queries)
    union = np.unique(ids[ids >= 0])
    np.testing.assert_allclose(found.out, attention(pairs[0], queries, union), atol=1e-4)


def test_the_papers_query_heads_attend_to_their_own(pairs: list[Pair]) -> None:
    queries = pairs[0].tests[0]
    one = rival(pairs[0], Paper(centred=False))
    found = one.step(queries, estimate=False)
    for head, row in enumerate(one.search(queries)):
        own = attention(pairs[0], queries[head : head + 1], row[row >= 0])
        np.testing.assert_allclose(found.out[head : head + 1], own, atol=1e-4)


def test_an_estimate_of_the_rest_brings_a_step_nearer_to_exact_attention(pairs: list[Pair]) -> None:
    pair = pairs[0]
    plain = rival(pair, RoarGraph(centred=True))
    mended = plain.with_estimate()
    errors = [
        [pair.errors(n, one.step(q, estimate=one.estimates).out).mean() for one in (plain, mended)]
        for n, q in enumerate(pair.tests)
    ]
    without, with_it = np.mean(errors, axis=0)
    assert with_it < without / 2


def test_clusters_retrieved_whole_and_the_others_estimated(pairs: list[Pair]) -> None:
    pair = pairs[0]
    index = RetroInfer()
    index.build(pair.wide, pair.training)
    step = RetroStep(pair, index, width=5, setting="", build_s=0)
    step.prepare()
    assert step.size_bytes() == index.size_bytes()
    queries = pair.tests[0]
    found = step.step(queries, estimate=True)
    head, ids = index.head, step.search(queries)
    read = ids[0]
    assert (ids == read).all()
    clusters = head.cluster_of[np.isin(index.ids_of(np.arange(len(pair.wide)), 1)[0], read)]
    assert 5 <= len(set(clusters)) <= 5 * pair.group
    assert len(read) == head.counts[list(set(clusters))].sum()
    logits = queries @ pair.wide[read].T * pair.scaling
    means = queries @ head.centroids.T * pair.scaling
    left = head.counts * ~np.isin(np.arange(len(head.counts)), clusters)
    values, kept = pair.head.values[read].astype(np.float32), left > 0
    counts, sums = left[kept].astype(np.float32), head.value_sums[kept].astype(np.float32)
    out = np.stack(
        [
            combine(mine, values, (theirs[kept], counts, sums), len(left))[0]
            for mine, theirs in zip(logits, means, strict=True)
        ]
    )
    np.testing.assert_allclose(found.out, out, atol=1e-3 * np.abs(out).max())


def test_the_bench_measures_our_kinds_and_rivals_in_one_json(vectors: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    out = tmp_path / "out.json"
    kinds = "clusters,graph,scan,exact,flat,flat+estimate,retroinfer"
    command = [sys.executable, "-W", "ignore", str(BENCH / "index.py"), "--vectors", str(vectors)]
    command += ["--heads", "1", "--queries", "5", "--indexes", kinds, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = json.loads(out.read_text())
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["mean"] == found["mean"]
    assert set(kinds.split(",")) | {"retroinfer@shared", "retroinfer@usual"} == set(found["mean"])
    assert found["mean"]["exact"]["error_plain"] < 1e-4
    assert found["mean"]["flat"]["recall"] == 1
    assert found["mean"]["flat"]["error"] is None
    assert found["mean"]["flat+estimate"]["error"] < found["mean"]["flat"]["error_plain"]
    assert found["mean"]["exact"]["us_search"] is None
    assert len(found["heads"]) == len(found["mean"])
    assert found["ratios"]["graph"]["graph"] == 1
