"""A context gets a new index without its model, and takes the old one's place in one step."""

from __future__ import annotations

import dataclasses
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heads import exact_top, prefill_queries, tie_aware_recall
from indexed import PARAMS, IndexedMaker
from shimmed import Shimmed

from openbook.indexstore import store as store_module
from openbook.indexstore.attend import search
from openbook.indexstore.build import IndexParams
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.errors import (
    AlreadyPublished,
    ContextInUse,
    FingerprintMismatch,
    OperationCancelled,
    StoreWriteFailed,
)
from openbook.indexstore.head import Budget, HeadPlan
from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.layout import FORMAT_VERSION
from openbook.indexstore.reindex import exact_neighbours, reindex
from openbook.indexstore.store import (
    StoredContext,
    begin,
    open_context,
    publish,
    read_manifest,
    replace,
    sweep,
)
from openbook.indexstore.verify import verify_context

PLAN = HeadPlan("clusters", 40, reach=2.0)
OTHER = IndexParams(degree=16, keys_per_cluster=24, seed=5)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return IndexedMaker(tmp_path).context()


def open_it(path: Path) -> StoredContext:
    return open_context(path, model_fingerprint=IndexedMaker.model)


def drafts(root: Path) -> list[Path]:
    return list((root / ".tmp").iterdir())


def in_text_order(context: StoredContext) -> list[bytes]:
    """Return keys and values of every head, as they stood in the text."""
    heads = [head for layer in range(2) for head in context.layer(layer).heads]
    return [
        head.in_text_order(rows).tobytes() for head in heads for rows in (head.keys, head.values)
    ]


def recall(context: StoredContext) -> float:
    """Return the mean recall of the best 20 keys over fresh queries of every head."""
    rng, found = np.random.default_rng(6), []
    for layer in range(2):
        for head in context.layer(layer).heads:
            for query in prefill_queries(rng, to_float32(head.keys), 20):
                result = search(head, query[None], Budget(keys=20), PLAN)
                found.append(tie_aware_recall(head.keys, query, result.top[0], 20))
    return float(np.mean(found))


def test_reindexed_context_is_the_same_with_another_index(indexed: Path, tmp_path: Path) -> None:
    old = read_manifest(indexed)
    with open_it(indexed) as reader:
        before = recall(reader)
        kept = {
            (layer, kind, head): array.tobytes()
            for layer in range(2)
            for kind, head, array in layer_arrays(reader.layer(layer))
        }
        texts = in_text_order(reader)
        ids = reader.token_ids.copy()
    with begin(tmp_path) as draft:
        new = reindex(indexed, draft, OTHER, threads=2)
        replace(draft, indexed)
    assert drafts(tmp_path) == []
    changed = {"index_fingerprint", "stages_s", "files", "bytes_total", "plan"}
    for field in dataclasses.fields(old):
        same = getattr(old, field.name) == getattr(new, field.name)
        assert same or field.name in changed, field.name
    assert new.index_fingerprint == OTHER.fingerprint()
    for heads, old_heads in zip(new.plan, old.plan, strict=True):
        assert [head.kind for head in heads] == [head.kind for head in old_heads]
        assert all(len(head.lift) == 2 and 0 < min(head.lift) for head in heads)
    assert read_manifest(indexed) == new
    with open_it(indexed) as reader:
        np.testing.assert_array_equal(reader.token_ids, ids)
        rebuilt = set()
        for layer in range(2):
            assert len(reader.layer(layer).heads[0].counts) <= 1000 // 24 + 1
            for kind, head, array in layer_arrays(reader.layer(layer)):
                if array.tobytes() != kept[layer, kind, head]:
                    rebuilt.add(kind.label)
        assert rebuilt <= {
            "keys", "values", "centroids", "counts", "value_sums", "cluster_of", "spreads",
            "members", "codes", "codebook", "code_basis", "code_spreads",
        }  # fmt: skip
        assert in_text_order(reader) == texts
        after = recall(reader)
    assert verify_context(indexed).probes_checked == 24
    assert after > before - 0.02 and after > 0.9, (before, after)


def test_same_parameters_give_the_same_index(indexed: Path, tmp_path: Path) -> None:
    with begin(tmp_path) as draft:
        assert reindex(indexed, draft, PARAMS).files == read_manifest(indexed).files


def test_context_without_a_middle_is_copied(maker: Any, tmp_path: Path) -> None:
    path = maker.context(640)
    with begin(tmp_path) as draft:
        assert reindex(path, draft, OTHER).files == read_manifest(path).files
        replace(draft, path)
    assert read_manifest(path).index_fingerprint == OTHER.fingerprint()


@pytest.mark.parametrize("m", [1, 7, 300])
def test_neighbours_are_the_exact_best(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    monkeypatch.setattr("openbook.indexstore.reindex.TILE_BYTES_MAX", 5000)
    rng = np.random.default_rng(m)
    keys, queries = rng.standard_normal((m, 8), "f4"), rng.standard_normal((40, 8), "f4")
    k = min(20, m)
    np.testing.assert_array_equal(exact_neighbours(keys, queries, k), exact_top(keys, queries, k))


def test_context_of_the_first_format_becomes_one_of_the_newest(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parent.parent / "data" / "golden-v1.tar.gz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    old = tmp_path / "old" / "golden-v1"
    with begin(tmp_path) as draft:
        new = reindex(old, draft, PARAMS)
        publish(draft, tmp_path / "new")
    assert (read_manifest(old).format_version, new.format_version) == (1, FORMAT_VERSION)
    assert {head.kind for layer in new.plan for head in layer} == {"clusters"}
    for path in (old, tmp_path / "new"):
        assert verify_context(path).probes_checked == 12
    with open_it(old) as before, open_it(tmp_path / "new") as after:
        for layer in range(2):
            for one, two in zip(before.layer(layer).heads, after.layer(layer).heads, strict=True):
                members = two.array("members")
                assert np.array_equal(one.keys[members], two.keys)
                assert np.array_equal(one.values[members], two.values)


def test_cancelled_reindex_leaves_the_old_one(indexed: Path, tmp_path: Path) -> None:
    with begin(tmp_path) as draft, pytest.raises(OperationCancelled):
        reindex(indexed, draft, OTHER, is_cancelled=lambda: True)
    assert drafts(tmp_path) == []
    assert read_manifest(indexed).index_fingerprint == PARAMS.fingerprint()


def relabelled(maker: Any, index: str = "index-2", **changes: Any) -> Any:
    """Seal a draft of the maker's context with another index fingerprint."""
    return maker.draft(maker.fields(index_fingerprint=index, **changes), seed=7)


def test_open_reader_is_undisturbed_and_the_old_files_go_with_it(maker: Any) -> None:
    path = maker.context()
    with open_it(path) as reader:
        before = reader.layer(1).heads[0].keys.copy()
        replace(relabelled(maker), path)
        np.testing.assert_array_equal(reader.layer(1).heads[0].keys, before)
        assert reader.manifest.index_fingerprint == "index-1"
        assert sweep(maker.root) == [] and len(drafts(maker.root)) == 1
        with open_it(path) as fresh:
            assert fresh.manifest.index_fingerprint == "index-2"
            assert fresh.layer(1).heads[0].keys.tobytes() != before.tobytes()
    assert len(sweep(maker.root)) == 1 and drafts(maker.root) == []


def test_reader_that_is_still_opening_gets_one_or_the_other(maker: Any) -> None:
    """Replaced after each layer of an open: what is read belongs to the manifest that was."""
    path = maker.context()
    for number in range(2):
        draft = relabelled(maker, f"index-{number}")

        def swap(layer: int, draft: Any = draft) -> None:
            if not draft.is_moved:
                replace(draft, path)

        with open_context(path, model_fingerprint=None, on_layer=swap) as reader:
            assert reader.manifest.index_fingerprint != f"index-{number}"
            assert len(reader._layers) == 2
    sweep(maker.root)
    assert drafts(maker.root) == []


def test_only_the_same_context_is_replaced(maker: Any) -> None:
    path = maker.context()
    with relabelled(maker, context_id="other") as draft, pytest.raises(AlreadyPublished):
        replace(draft, path)
    with relabelled(maker, model_fingerprint="sha256:b") as draft:
        with pytest.raises(FingerprintMismatch):
            replace(draft, path)
    with begin(maker.root) as draft, pytest.raises(ValueError, match="not sealed"):
        replace(draft, path)
    assert read_manifest(path).index_fingerprint == "index-1"
    assert drafts(maker.root) == []


def test_file_system_that_cannot_swap_deletes_first_unless_in_use(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "exchange", lambda first, second: False)
    path = maker.context()
    draft = relabelled(maker)
    with open_it(path), pytest.raises(ContextInUse):
        replace(draft, path)
    replace(draft, path)
    assert read_manifest(path).index_fingerprint == "index-2"
    assert drafts(maker.root) == [] and list((maker.root / ".trash").iterdir()) == []


def test_replace_may_be_retried_when_its_outcome_is_unknown(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draft = maker.context(), relabelled(maker)

    def fail(directory: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "sync_directory", fail)
        with pytest.raises(StoreWriteFailed):
            replace(draft, path)
    replace(draft, path)
    assert read_manifest(path).index_fingerprint == "index-2"
    assert publish(maker.draft(maker.fields()), path) is False
    sweep(maker.root)
    assert drafts(maker.root) == []


@pytest.mark.parametrize("kind", ["kill", "eio"])
def test_fault_at_each_step_of_a_replacement_leaves_the_old_or_the_new(
    shimmed: Shimmed, kind: str
) -> None:
    calls = shimmed.trace("replace")
    calls = calls[[call.op for call in calls].index("prepared") :]
    numbers = [call.number for call in calls if call.number]
    writes = {call.number for call in calls if call.op == "write"}
    rng = random.Random(1)
    chosen = sorted({*rng.sample(sorted(writes), 8), *(set(numbers) - writes)})
    outcomes = shimmed.matrix(kind, chosen, "replace")
    end = "SIGKILL" if kind == "kill" else "failed"
    assert set(outcomes) == {f"{end} old whole", f"{end} new whole"}, outcomes
    # After the swap come the syncs of both directories.
    assert outcomes[f"{end} new whole"] == 2
