"""Sealed contexts whose digests are right and whose contents are not, or are gone while read."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MODEL
from indexed import IndexedMaker
from test_golden import golden

from openbook.indexstore.attend import attend
from openbook.indexstore.build import IndexParams
from openbook.indexstore.errors import OperationCancelled, ShardCorrupt, ShardTruncated
from openbook.indexstore.head import AttendRequest, Budget, HeadPlan, LayerIndex
from openbook.indexstore.layout import DTYPES, HEADER_BYTES
from openbook.indexstore.reindex import reindex
from openbook.indexstore.store import begin, open_context, replace
from openbook.indexstore.verify import verify_context

Edit = Callable[[Any], None]
NUMPY_OF = {code: dtype for code, dtype in DTYPES.values()}


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A context of 1,000 tokens, 360 of them in the middle, that its owner may change."""
    return unsealed(IndexedMaker(tmp_path).context(1000))


def unsealed(path: Path) -> Path:
    for file in path.iterdir():
        file.chmod(0o600)
    return path


def forge(forger: Any, path: Path, file: str, edits: dict[str, Edit]) -> None:
    """Change arrays of a file, by the keys of their records, and make every digest right again."""

    def edit(records: dict[bytes, bytes]) -> None:
        for key, change in edits.items():
            value = bytearray(records[key.encode()])
            (payload,) = struct.unpack_from("<Q", value, 40)
            part = slice(HEADER_BYTES, HEADER_BYTES + payload)
            array = np.frombuffer(value[part], NUMPY_OF[value[7]]).copy()
            change(array)
            value[part] = array.tobytes()
            records[key.encode()] = bytes(value)

    forger.records(path, file, edit)
    forger.record_digests(path, file)


def put(place: int, number: float) -> Edit:
    def edit(array: Any) -> None:
        array[place] = number

    return edit


def swapped(array: Any) -> None:
    array[[0, -1]] = array[[-1, 0]]


def merged(cluster_of: Any) -> None:
    cluster_of[cluster_of == 2] = 1


def moved(counts: Any) -> None:
    counts[1:3] = counts[1] + counts[2], 0


NOT_FINITE = ("centroids", "value_sums", "codebook", "code_basis", "code_spreads", "spreads")
FORGED: list[tuple[dict[str, Edit], str]] = [
    ({"members": put(0, 5)}, "members names a key twice"),
    ({"members": put(0, 2**32 - 1)}, "members holds id 4294967295 of 360"),
    ({"cluster_of": swapped}, "its keys are not in the order"),
    ({"cluster_of": put(-1, 23)}, "cluster_of holds id 23 of 23"),
    ({"counts": put(0, 2**32 - 1)}, "counts differ"),
    ({"cluster_of": merged, "counts": moved}, "a cluster has no members"),
    ({"spreads": put(1, -1)}, "spreads holds a number that is negative"),
]
FORGED += [
    ({name: put(3, number)}, f"{name} holds a number that is .*not finite")
    for name in NOT_FINITE
    for number in (np.nan, np.inf, -np.inf)
]


@pytest.mark.parametrize(("edits", "problem"), FORGED)
def test_forged_head_is_refused_though_all_digests_match(
    indexed: Path, forger: Any, edits: dict[str, Edit], problem: str
) -> None:
    of_head = {f"{name}/001": edit for name, edit in edits.items()}
    forge(forger, indexed, "layer-001.mdb", of_head)
    with pytest.raises(ShardCorrupt, match=f"head 1: {problem}"):
        open_context(indexed, model_fingerprint=MODEL)


@pytest.mark.parametrize("name", ["centroids", "value_sums", "centre", "scale"])
def test_number_that_is_none_is_refused_in_the_first_format_too(
    tmp_path: Path, forger: Any, name: str
) -> None:
    path = unsealed(golden(1, tmp_path))
    forge(forger, path, "layer-000.mdb", {f"{name}/000": put(0, np.nan)})
    with pytest.raises(ShardCorrupt, match=f"head 0: {name} holds a number that is not finite"):
        open_context(path, model_fingerprint=MODEL)


PLANS = [("queue", number) for number in (-1, 2**31, 2**62, 1.5, True)]
PLANS += [("reach", number) for number in (-1.0, 100.5, 1e400, float("nan"), 5, None)]
PLANS += [("lift", [number] * 2) for number in (-0.5, 1.5, float("nan"), 1)]


@pytest.mark.parametrize(("field", "value"), PLANS)
def test_forged_plan_is_refused(indexed: Path, forger: Any, field: str, value: Any) -> None:
    def edit(whole: Any) -> None:
        whole["fields"]["plan"][1][1][field] = value

    forger.manifest(indexed, edit)
    with pytest.raises(ShardCorrupt, match="manifest.json"):
        open_context(indexed, model_fingerprint=MODEL)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_scaling_that_no_request_may_have_is_refused(
    indexed: Path, forger: Any, factor: float
) -> None:
    forger.manifest(indexed, lambda whole: whole["fields"].update(scaling=[0.25, factor]))
    with pytest.raises(ShardCorrupt, match="scaling holds a number that is not positive"):
        open_context(indexed, model_fingerprint=MODEL)


def test_counts_lost_under_their_reader_end_no_process(tmp_path: Path) -> None:
    """The page of a head's counts reads as zeros then, and fewer keys are found than there are."""
    path = unsealed(IndexedMaker(tmp_path).context(4640))
    queries = np.random.default_rng(0).standard_normal((4, 1, 16), np.float32)
    with open_context(path, model_fingerprint=MODEL) as context:
        layer = LayerIndex(context.layer(0).heads, context.manifest.plan[0])
        os.truncate(path / "layer-000.mdb", 4096)
        for keys in (100, 1000, 4000):
            request = AttendRequest(layer, queries, 0.25, Budget(keys=keys))
            (result,) = attend([request])
            assert result.keys_read == 2 * 16  # a block of each head's: all clusters seem empty
        with pytest.raises(ShardTruncated):
            context.check()
        del layer, request


@pytest.mark.parametrize("version", [1, 2])
def test_reindexing_again_changes_nothing_and_cancelled_it_leaves_nothing(
    tmp_path: Path, version: int
) -> None:
    path, files = golden(version, tmp_path / "local"), []
    for threads in (1, 8):
        draft = begin(tmp_path)
        reindex(path, draft, IndexParams(), threads=threads)
        replace(draft, path)
        draft.discard()
        verify_context(path)
        files.append([(path / f"layer-00{layer}.mdb").read_bytes() for layer in (0, 1)])
        plan = open_plan(path)
    assert files[0] == files[1] and plan == ["clusters"]
    calls = iter([False, True])
    with begin(tmp_path) as draft, pytest.raises(OperationCancelled):
        reindex(path, draft, IndexParams(), is_cancelled=lambda: next(calls))
    verify_context(path)
    assert [(path / f"layer-00{layer}.mdb").read_bytes() for layer in (0, 1)] == files[1]
    assert not list((tmp_path / ".tmp").iterdir())


def open_plan(path: Path) -> list[str]:
    with open_context(path, model_fingerprint=MODEL) as context:
        return [head.kind for head in context.manifest.plan[0]]


def test_search_by_clusters_of_a_head_without_codes_is_refused(tmp_path: Path) -> None:
    with open_context(golden(1, tmp_path), model_fingerprint=MODEL) as context:
        heads, d = context.layer(0).heads, context.manifest.head_dim
        queries = np.ones((context.manifest.query_heads, 1, d), np.float32)
        plan = (HeadPlan("clusters", 200, reach=2.0),) * len(heads)
        with pytest.raises(ValueError, match="a head was not built for its plan"):
            attend([AttendRequest(LayerIndex(heads, plan), queries, 0.25, Budget())])
        del heads


def test_keys_that_are_no_numbers_are_not_indexed_anew(
    indexed: Path, tmp_path: Path, forger: Any
) -> None:
    forge(forger, indexed, "layer-001.mdb", {"keys/001": put(3, np.inf)})
    problem = "layer-001.mdb: head 1: .*not finite"
    with begin(tmp_path) as draft, pytest.raises(ShardCorrupt, match=problem):
        reindex(indexed, draft, IndexParams())
