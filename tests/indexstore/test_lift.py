"""The lift makes the estimate weigh what the keys not read weigh, and is never unsafe."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Maker
from heads import make_head, prefill_queries, structured
from indexed import PARAMS, SCALING, IndexedMaker

from openbook.indexstore.attend import attend
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import (
    EXACT,
    LIFT_MAX,
    AttendRequest,
    Budget,
    HeadIndex,
    HeadPlan,
    LayerIndex,
)
from openbook.indexstore.lift import LIFT_UNTAUGHT, fit_lift, lift_plan, rest_means
from openbook.indexstore.reindex import reindex
from openbook.indexstore.store import begin, read_manifest

DATA = Path(__file__).parent.parent / "data"
GROUP = 3
SHARPNESS = 0.25  # of the queries: attention is spread over many keys, as in a diffuse head
SCAN, GRAPH = HeadPlan("scan", 128), HeadPlan("graph", 128)
CLUSTERS = HeadPlan("clusters", 200, reach=2.0)


def answered(head: HeadIndex, queries: Any, budget: Budget, plan: HeadPlan) -> Any:
    """Answer queries (group, p, d) one by one: AttendResults."""
    layer = LayerIndex((head,), (plan,))
    return [
        attend([AttendRequest(layer, one, SCALING, budget, evidence=True)])[0]
        for one in (np.ascontiguousarray(queries[:, i : i + 1]) for i in range(queries.shape[1]))
    ]


def exact_lse(head: HeadIndex, queries: Any) -> Any:
    return np.concatenate([r.lse for r in answered(head, queries, EXACT, SCAN)], axis=1)


def fresh(seed: int, keys: Any, count: int) -> Any:
    rng = np.random.default_rng(seed)
    queries = prefill_queries(rng, keys, GROUP * count) * np.float32(SHARPNESS)
    return queries.reshape(GROUP, count, -1)


def mass_error(head: HeadIndex, queries: Any, budget: Budget, plan: HeadPlan) -> float:
    """Return the mean signed difference of the estimate's share and that of the keys not read."""
    errors = []
    for result, lse in zip(
        answered(head, queries, budget, plan), exact_lse(head, queries).T, strict=True
    ):
        read = np.array([np.exp(z - own).sum() for z, own in zip(result.logits, lse, strict=True)])
        errors.append(np.exp(result.estimated_lse - result.lse)[:, 0] - (1 - read))
    return float(np.mean(errors))


@pytest.mark.parametrize("plan", [CLUSTERS, SCAN, GRAPH])
@pytest.mark.parametrize("keys", [32, 400])
def test_lifted_estimate_weighs_what_was_not_read(plan: HeadPlan, keys: int) -> None:
    rows = structured(np.random.default_rng(1), 3000, 32)
    head = make_head(rows)
    probes = fresh(2, rows, 8)
    lift = fit_lift(head, probes, exact_lse(head, probes), plan=plan, scaling=SCALING)
    unseen, budget = fresh(3, rows, 40), Budget(keys=keys)
    before = mass_error(head, unseen, budget, plan)
    after = mass_error(head, unseen, budget, replace(plan, lift=lift))
    assert abs(after) < 0.01, (before, after)
    if (plan, keys) != (SCAN, 32):  # a scan reads so few then that a lift of nothing is right
        assert abs(after) < abs(before), (before, after)


def test_mean_of_a_cluster_s_rest_is_that_of_its_keys_not_read() -> None:
    rows = structured(np.random.default_rng(4), 300, 16)
    head = make_head(rows)
    queries = fresh(5, rows, 1)[:, 0]
    read = np.flatnonzero(head.cluster_of <= 2)[2:].astype(np.uint32)  # two keys are left of three
    scores = queries @ to_float32(head.keys).T  # (group, m)
    means, left = rest_means(head, queries, read, np.ascontiguousarray(scores[:, read]))
    unread = np.setdiff1d(np.arange(300), read)
    for cluster in range(len(head.counts)):
        members = unread[head.cluster_of[unread] == cluster]
        assert left[cluster] == len(members)
        expected = scores[:, members].mean(axis=1) if len(members) else np.full(GROUP, -np.inf)
        np.testing.assert_allclose(means[:, cluster], expected, rtol=1e-3, atol=0.05)


def test_head_of_few_keys_takes_the_usual_lift() -> None:
    for count in (1, 2, 15, 16):
        rows = structured(np.random.default_rng(count), count, 16)
        head, probes = make_head(rows, train=20), fresh(1, rows, 4)
        lift = fit_lift(head, probes, exact_lse(head, probes), plan=SCAN, scaling=SCALING)
        assert lift == (LIFT_UNTAUGHT,) * GROUP
        for keys in (0, 1, 10):
            for result in answered(head, probes, Budget(keys=keys), replace(SCAN, lift=lift)):
                assert np.isfinite(result.out).all() and np.isfinite(result.lse).all()


@pytest.mark.parametrize("kind", ["equal", "zero", "huge", "far"])
def test_lift_of_odd_heads_stays_in_its_range(kind: str) -> None:
    rows = structured(np.random.default_rng(6), 900, 16)
    if kind == "equal":
        rows[:] = rows[0]
    elif kind == "zero":
        rows[:] = 0
    elif kind == "huge":
        rows *= 300
    elif kind == "far":
        rows -= 2000  # every score is very low: e to it alone is nothing
    head, probes = make_head(rows), fresh(7, structured(np.random.default_rng(6), 900, 16), 4)
    lse = exact_lse(head, probes)
    lift = fit_lift(head, probes, lse, plan=SCAN, scaling=SCALING)
    assert len(lift) == GROUP and all(0 <= one <= LIFT_MAX for one in lift)
    for result in answered(head, probes, Budget(keys=20), replace(SCAN, lift=lift)):
        assert np.isfinite(result.out).all() and np.isfinite(result.lse).all()


def test_golden_context_is_not_lifted_until_it_is_indexed_anew(tmp_path: Path) -> None:
    with tarfile.open(DATA / "golden-v1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    old = read_manifest(tmp_path / "golden-v1")
    assert [head.lift for layer in old.plan for head in layer] == [(), ()]
    with begin(tmp_path / "drafts") as draft:
        new = reindex(tmp_path / "golden-v1", draft, PARAMS)
    # Its middle of seven keys is always read whole.
    assert [head.lift for layer in new.plan for head in layer] == [(LIFT_UNTAUGHT,) * 2] * 2


def test_without_probes_there_is_no_lift() -> None:
    rows = structured(np.random.default_rng(8), 300, 16)
    none = np.zeros((GROUP, 0, 16), np.float32)
    head = make_head(rows)
    assert fit_lift(head, none, none[..., 0], plan=SCAN, scaling=SCALING) == ()


def test_lifts_of_a_layer_are_the_same_for_any_threads(tmp_path: Path) -> None:
    maker = IndexedMaker(tmp_path)
    fields = maker.fields()
    records = maker.layer(0, fields)
    one, two = (
        lift_plan(fields.plan[0], records, scaling=SCALING, threads=threads) for threads in (1, 2)
    )
    assert one == two
    assert [head.kind for head in one] == [head.kind for head in fields.plan[0]]
    assert all(0 <= lift <= LIFT_MAX for head in one for lift in head.lift)
    windowed = Maker(tmp_path).layer(0, Maker(tmp_path).fields(600))
    assert lift_plan((), windowed, scaling=SCALING) == ()
