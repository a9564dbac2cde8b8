"""Heads, requests and budgets that are wrong on purpose: refused or answered, never a crash.

What is wrong inside a sealed context is in test_broken_contexts.py.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from heads import make_head, structured
from threadpoolctl import threadpool_info

from openbook.indexstore._head import Borrowed
from openbook.indexstore.attend import attend, search
from openbook.indexstore.build import IndexParams, build_head, build_heads
from openbook.indexstore.head import (
    KEYS_MAX,
    AttendRequest,
    Budget,
    HeadIndex,
    HeadPlan,
    LayerIndex,
)
from openbook.indexstore.layer import check_head

CLUSTERS = HeadPlan("clusters", 300, reach=2.0)
LARGEST = np.float32(3e38)
# Numbers that overflow, vanish or cancel; in queries and keys also those that are none.
ODD = np.array([0, 1, -1, 1e-45, -1e-40, 1e10, -1e10, 1e19, 1e30, -1e30, LARGEST, -LARGEST], "f4")
ODDER = np.concatenate([ODD, np.array([np.inf, -np.inf, np.nan], "f4")])


def head_of(m: int, d: int, *, seed: int = 0) -> HeadIndex:
    return make_head(
        structured(np.random.default_rng(seed), m, d), kv_dtype="float32", train=30, seed=seed
    )


def request_of(
    *heads: HeadIndex, group: int = 3, plan: HeadPlan = CLUSTERS, **changes: Any
) -> AttendRequest:
    rng = np.random.default_rng(1)
    d = heads[0].keys.shape[1]
    queries = rng.standard_normal((group * len(heads), 1, d), np.float32)
    fields = {"queries": queries, "scaling": 0.5, "budget": Budget()}
    return AttendRequest(LayerIndex(heads, (plan,) * len(heads)), **{**fields, **changes})


def spoiled(rng: np.random.Generator, array: Any, numbers: Any, share: float) -> Any:
    """Return `array` with about that share of its numbers replaced."""
    out = np.array(array, np.float32)
    chosen = rng.random(out.shape) < share
    out[chosen] = rng.choice(numbers, int(chosen.sum()))
    return out


def test_centroid_whose_score_is_no_number_hides_no_peak() -> None:
    """Infinity less infinity in one centroid's score once made another's level positive."""
    head = head_of(2000, 16)
    queries = np.full((4, 16), 10, np.float32)
    centroids = head.centroids.astype(np.float32)
    centroids[[3, 11]] = 0
    centroids[3, :2] = LARGEST, -LARGEST  # their products with a query overflow
    for score in range(400, 12_000, 97):
        centroids[11, 0] = score / 10
        forged = replace(head, centroids=centroids.copy())
        check_head(forged, 0)
        found = search(forged, queries, Budget(keys=2000), CLUSTERS, scaling=1.0)
        for top in found.top:
            assert np.array_equal(np.sort(top), np.arange(2000))


def test_heads_of_odd_finite_numbers_find_as_many_keys_as_were_asked_for() -> None:
    rng = np.random.default_rng(5)
    heads = [head_of(m, d) for m, d in ((1000, 16), (333, 7), (17, 64), (16, 2), (1, 1), (15, 513))]
    floats = ("centroids", "codebook", "code_basis", "code_spreads", "value_sums", "keys")
    for _ in range(200):
        head, share = heads[rng.integers(len(heads))], float(rng.choice([0.01, 0.1, 0.5, 1]))
        chosen = [name for name in floats if rng.random() < 0.4]
        changes = {
            name: spoiled(rng, getattr(head, name), ODDER if name == "keys" else ODD, share)
            for name in chosen
        }
        changes["spreads"] = np.abs(spoiled(rng, head.spreads, ODD, share / 2))
        forged, m = replace(head, **changes), head.middle_tokens
        check_head(forged, 0)
        group, keys = int(rng.choice([1, 3, 64])), int(rng.choice([0, 1, 100, m, m + 1, KEYS_MAX]))
        queries = rng.standard_normal((group, 1, head.keys.shape[1]), np.float32)
        request = request_of(
            forged,
            queries=spoiled(rng, queries, ODDER, share / 2),
            scaling=float(rng.choice([1e-30, 0.1, 1e30])),
            budget=Budget(keys=keys, estimate=bool(rng.random() < 0.7)),
            plan=replace(CLUSTERS, reach=float(rng.choice([0.0, 2.0, 100.0]))),
            evidence=True,
        )
        (result,) = attend([request])
        for ids in result.ids:
            assert len(np.unique(ids)) == len(ids) == result.keys_read
            assert min(keys, m) <= len(ids) <= m


@pytest.mark.parametrize("d", [1, 2, 513])
@pytest.mark.parametrize("kind", ["same", "zero", "spread"])
def test_tiny_heads_are_answered_as_by_full_attention(d: int, kind: str) -> None:
    rng = np.random.default_rng(d)
    for m in (1, 15, 16, 17):
        keys = rng.standard_normal((m, d), np.float32) / np.float32(d**0.5)
        keys *= kind != "zero"
        if kind == "same":
            keys[:] = keys[0]
        values = rng.standard_normal((m, d + 3), np.float32)
        train = rng.standard_normal((4, d), np.float32)
        head = build_head(keys, values, train, None, params=IndexParams())
        check_head(head, 0)
        for group in (1, 64):
            queries = rng.standard_normal((group, d), np.float32)
            found = search(head, queries, Budget(), CLUSTERS, scaling=1.0)
            scores = queries @ keys.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            right = weights @ values / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(found.out[:, 0], right, atol=1e-4)
            few = search(head, queries, Budget(keys=1), CLUSTERS, scaling=1.0)
            assert few.top.shape == (group, 1) and np.isfinite(few.out).all()


@pytest.mark.parametrize("keys", [0, 1, 301, 2**31 - 1])
@pytest.mark.parametrize("queue", [0, 300, 2**31 - 1])
def test_budget_of_any_size_reads_what_is_there(keys: int, queue: int) -> None:
    head = head_of(300, 16)
    plan = HeadPlan("clusters", queue, reach=2.0)
    (plain,) = attend(
        [request_of(head, group=1, plan=plan, budget=Budget(keys=keys, estimate=False))]
    )
    assert plain.keys_read == min(keys, 300) and np.isfinite(plain.out).all()
    (result,) = attend([request_of(head, group=1, plan=plan, budget=Budget(keys=keys))])
    scored = max(2 * keys, -(-queue * keys // 100))  # exactly, and so read with the estimate
    assert result.keys_read == min(scored, 300) and np.isfinite(result.out).all()


@pytest.mark.parametrize("keys", [2**31, 2**62, 2**64])
def test_budget_that_no_context_has_tokens_for_is_refused(keys: int) -> None:
    with pytest.raises(ValueError, match=f"budget keys must be from 0 to {2**31 - 1}"):
        Budget(keys=keys)


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads must be positive, got {threads}"):
        attend([request_of(head_of(20, 16))], threads=threads)


def test_heads_of_different_sizes_in_one_request_are_refused() -> None:
    head = head_of(300, 16)
    wide = np.zeros((len(head.counts), 4096), np.float32)
    longer = replace(head, values=np.zeros((300, 4096), np.float32), value_sums=wide)
    for other in (longer, head_of(300, 32)):
        with pytest.raises(ValueError, match="heads differ in the size"):
            attend([request_of(head, other)])


def test_numbers_in_another_order_of_bytes_are_refused() -> None:
    head = head_of(20, 16)
    with pytest.raises(TypeError, match="stored dtype, got >f4"):
        replace(head, keys=head.keys.astype(">f4"), values=head.values.astype(">f4"))
    with pytest.raises(TypeError, match="float16 or float32, got >f"):
        replace(head, value_sums=head.value_sums.astype(">f4"))


def test_head_without_clusters_is_refused() -> None:
    head = head_of(20, 16)
    names = ("centroids", "counts", "value_sums", "spreads")
    changes = {name: getattr(head, name)[:0] for name in names}
    empty = replace(head, **changes, entries=np.array(head.entries[:1]))
    with pytest.raises(ValueError, match=r"cluster_of holds id \d+ of 0"):
        check_head(empty, 0)


def stand_in(head: HeadIndex, **changes: Any) -> Any:
    """Return something with a head's attributes that is none."""
    fields = {name: getattr(head, name) for name in HeadIndex.__slots__}
    methods = {"serves": lambda _: True, "middle_tokens": head.middle_tokens}
    return SimpleNamespace(**{**fields, **methods, **changes})


def test_what_is_no_head_is_refused_by_the_kernels() -> None:
    head = head_of(300, 16)
    for junk in (None, "x" * 1000, object()):
        with pytest.raises(TypeError, match="Borrowed"):
            attend([request_of(stand_in(head, borrowed=junk))])
    for name in ("values", "codes", "counts", "graph"):
        with pytest.raises(TypeError, match="ndarray"):
            Borrowed(stand_in(head, **{name: SimpleNamespace(shape=(3, 3))}))
    for junk in (None, 7):
        with pytest.raises(AttributeError):
            Borrowed(junk)
    with pytest.raises(TypeError):
        copy.deepcopy(head)  # its pointers would be those of the other arrays


def test_copied_and_changed_heads_outlive_the_one_they_are_of() -> None:
    head = head_of(300, 16)
    (right,) = attend([request_of(head)])
    others = [copy.copy(head), replace(head, keys=head.keys.copy())]
    del head
    gc.collect()
    for other in others:
        (result,) = attend([request_of(other)])
        assert np.array_equal(result.out, right.out)


def test_heads_dropped_while_other_threads_attend_are_kept_until_answered() -> None:
    made = [head_of(300, 16, seed=seed) for seed in range(3)]
    (right,) = attend([request_of(*made)])
    wrong: list[int] = []

    def ask(number: int) -> None:
        for _ in range(40):
            heads = [replace(h, keys=h.keys.copy(), codes=np.array(h.codes)) for h in made]
            request = request_of(*heads)
            del heads
            (result,) = attend([request], threads=1 + number * 21)
            if not np.array_equal(result.out, right.out):
                wrong.append(number)

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
        assert not asker.is_alive()
    assert not wrong


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_builds_that_overlap_keep_one_thread_of_blas_and_give_it_back() -> None:
    """An ingest and a reindex of another context build at once; the first to end is the first."""
    head, second_runs, seen = head_of(20, 16), threading.Event(), []

    def first(_: int) -> HeadIndex:
        second.start()
        assert second_runs.wait(30)
        return head

    def other(_: int) -> HeadIndex:
        second_runs.set()
        opening.join(30)
        seen.append(blas_threads())
        return head

    opening = threading.Thread(target=build_heads, args=(first, 1), kwargs={"threads": 1})
    second = threading.Thread(target=build_heads, args=(other, 1), kwargs={"threads": 1})
    if (before := blas_threads()) == {1}:
        pytest.skip("BLAS has one thread here, whoever builds")
    opening.start()
    opening.join(60)
    second.join(60)
    assert not second.is_alive() and seen == [{1}]
    assert blas_threads() == before


FORKED = """
import os, sys
import numpy as np
from openbook.indexstore.build import IndexParams, build_head, build_heads

def build(_):
    keys = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float16)
    return build_head(keys, keys, np.zeros((0, 8), np.float32), None, params=IndexParams())

build_heads(build, 2, threads=2)
pid = os.fork()
if pid == 0:
    build_heads(build, 2, threads=2)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_of_a_process_that_built_may_build() -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # no threads to lose in a fork
    done = subprocess.run([sys.executable, "-c", FORKED], env=environment, timeout=60)
    assert done.returncode == 7
