"""Contexts appear whole, leave whole, and never under a reader."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.indexstore import store as store_module
from openbook.indexstore.errors import (
    AlreadyPublished,
    ContextInUse,
    ContextMissing,
    FingerprintMismatch,
    ShardCorrupt,
    StoreWriteFailed,
)
from openbook.indexstore.store import (
    begin,
    delete,
    list_contexts,
    open_context,
    publish,
    read_summary,
    sweep,
)

PROCESS = Path(__file__).with_name("store_process.py")


def open_it(path: Path) -> Any:
    return open_context(path, model_fingerprint="sha256:model-a")


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run store_process.py, which does not outlive the block."""
    command = [sys.executable, str(PROCESS), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_published_context_is_private_and_holds_nothing_else(context: Path) -> None:
    root = context.parent.parent
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in context.iterdir()}
    files = ["manifest.json", "tokens.mdb", "layer-000.mdb", "layer-001.mdb"]
    assert names == dict.fromkeys(files, 0o444)
    assert stat.S_IMODE(context.stat().st_mode) == 0o700
    assert stat.S_IMODE(context.parent.stat().st_mode) == 0o700
    assert list((root / ".tmp").iterdir()) == []


def test_second_writer_adopts_the_first_ones_context(maker: Any) -> None:
    first, second = maker.draft(maker.fields()), maker.draft(maker.fields(), seed=5)
    assert publish(first, maker.final()) is True
    inode = (maker.final() / "manifest.json").stat().st_ino
    assert publish(second, maker.final()) is False
    assert (maker.final() / "manifest.json").stat().st_ino == inode
    assert list((maker.root / ".tmp").iterdir()) == []


def test_publish_never_replaces_another_context(maker: Any) -> None:
    path = maker.context()
    other = maker.draft(maker.fields(context_id="other"))
    with pytest.raises(AlreadyPublished, match="other"):
        publish(other, path)
    foreign = maker.draft(maker.fields(model_fingerprint="sha256:model-b"))
    with pytest.raises(FingerprintMismatch):
        publish(foreign, path)
    assert read_summary(path).context_id == maker.fields().context_id


def test_damaged_context_is_not_adopted_but_can_be_replaced(maker: Any) -> None:
    path = maker.context()
    os.chmod(path / "layer-000.mdb", 0o600)
    os.truncate(path / "layer-000.mdb", 4096)
    draft = maker.draft(maker.fields())
    with pytest.raises(ShardCorrupt):
        publish(draft, path)
    delete(path, maker.root / ".trash")
    assert publish(draft, path) is True
    open_it(path).close()


def test_unsealed_draft_is_not_published(maker: Any) -> None:
    with begin(maker.root) as draft:
        draft.write_tokens(*maker.tokens(maker.fields()))
        with pytest.raises(ValueError, match="not sealed"):
            publish(draft, maker.final())


def test_publish_may_be_retried_when_its_outcome_is_unknown(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = maker.draft(maker.fields())
    maker.final().parent.mkdir()

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "sync_directory", fail)
        with pytest.raises(StoreWriteFailed):
            publish(draft, maker.final())
    assert publish(draft, maker.final()) is True
    open_it(maker.final()).close()


def test_context_whose_last_sync_failed_is_not_taken_away_again(
    maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers may have it already; removed file by file it would be half a context to them."""
    draft = maker.draft(maker.fields())
    maker.final().parent.mkdir()

    def fail(path: Path) -> None:
        if path == maker.final().parent:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store_module, "sync_directory", fail)
    with draft, pytest.raises(StoreWriteFailed):
        publish(draft, maker.final())
    open_it(maker.final()).close()
    monkeypatch.undo()
    assert publish(maker.draft(maker.fields()), maker.final()) is False


def test_published_draft_is_not_discarded(maker: Any) -> None:
    with maker.draft(maker.fields()) as draft:
        publish(draft, maker.final())
    draft.discard()
    open_it(maker.final()).close()


def test_deleted_context_is_gone_whole(context: Path) -> None:
    trash = context.parent.parent / ".trash"
    delete(context, trash)
    assert not context.exists() and list(trash.iterdir()) == []
    with pytest.raises(ContextMissing):
        delete(context, trash)
    with pytest.raises(ContextMissing):
        open_it(context)


def test_context_in_use_is_not_deleted(context: Path) -> None:
    trash = context.parent.parent / ".trash"
    with open_it(context), open_it(context):
        with pytest.raises(ContextInUse):
            delete(context, trash)
    delete(context, trash)


def test_context_deleted_while_it_is_read_is_there_for_its_readers_alone(maker: Any) -> None:
    path, trash = maker.context(), maker.root / ".trash"
    with open_it(path) as reader:
        before = reader.layer(1).heads[1].graph.copy()
        delete(path, trash, even_if_read=True)
        with pytest.raises(ContextMissing):
            open_it(path)
        assert sweep(maker.root) == [] and len(list(trash.iterdir())) == 1
        assert publish(maker.draft(maker.fields()), path)  # the same one, read again
        open_it(path).close()
        assert np.array_equal(reader.layer(1).heads[1].graph, before)
        reader.check()
    assert len(sweep(maker.root)) == 1 and list(trash.iterdir()) == []
    open_it(path).close()


def test_context_without_manifest_can_be_deleted(context: Path) -> None:
    (context / "manifest.json").unlink()
    delete(context, context.parent.parent / ".trash")
    assert not context.exists()


def test_opening_while_deleting_is_whole_or_missing(maker: Any) -> None:
    """Two threads open, one deletes and publishes again: no reader ever meets half a context."""
    path, trash = maker.context(), maker.root / ".trash"
    drafts = [maker.draft(maker.fields()) for _ in range(12)]
    stop, opened, surprises = threading.Event(), [], []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            try:
                with open_it(path) as context:
                    opened.append(int(context.layer(1).heads[1].graph.sum()))
            except (ContextMissing, ContextInUse):
                pass
            except Exception as error:
                surprises.append(error)
            time.sleep(rng.uniform(0, 0.02))

    def replace_with(draft: Any) -> None:
        while not stop.is_set():
            try:
                delete(path, trash)
                break
            except ContextInUse:
                time.sleep(0.001)
        assert publish(draft, path)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    timer = threading.Timer(60, stop.set)
    for thread in (*threads, timer):
        thread.start()
    try:
        for draft in drafts:
            replace_with(draft)
    finally:
        stop.set()
        timer.cancel()
        for thread in threads:
            thread.join()
    assert surprises == []
    assert len(set(opened)) == 1


def test_sweep_takes_dead_drafts_and_leaves_live_ones(maker: Any) -> None:
    live, dead = maker.draft(maker.fields()), maker.draft(maker.fields())
    dead.release()  # what the kernel does for a killed writer
    stray = maker.root / ".tmp" / "stray"
    stray.write_bytes(b"x")
    grave = maker.root / ".trash" / "grave"
    grave.mkdir(parents=True)
    (grave / "layer-000.mdb").write_bytes(b"x")
    assert sweep(maker.root) == sorted([dead.path, stray]) + [grave]
    assert sweep(maker.root) == []
    assert publish(live, maker.final())


def test_sweep_does_not_follow_links_out_of_the_store(maker: Any, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x")
    (maker.root / ".tmp").mkdir(exist_ok=True)
    (maker.root / ".tmp" / "link").symlink_to(precious)
    sweep(maker.root)
    assert (precious / "file").exists() and not (maker.root / ".tmp" / "link").exists()


def test_list_shows_published_contexts_alone(maker: Any) -> None:
    assert list_contexts(maker.root / "local") == []
    paths = [maker.context(context_id=name) for name in ("b", "a")]
    (maker.root / "local" / "empty").mkdir()
    (maker.root / "local" / ".hidden").mkdir()
    (maker.root / "local" / "link").symlink_to(paths[0])
    assert list_contexts(maker.root / "local") == sorted(paths)


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_case_b28_killed_writer_leaves_whole_contexts_and_sweepable_rest(
    maker: Any, rounds: int
) -> None:
    rng = random.Random(28)
    with started("killed", maker.root, rounds) as forker:
        assert forker.stdout is not None
        for round_ in range(rounds):
            kind, pid = forker.stdout.readline().split()
            assert kind == "child"
            time.sleep(rng.uniform(0, 0.25))
            os.kill(int(pid), signal.SIGKILL)
            acknowledged = list(iter(forker.stdout.readline, "dead\n"))
            published = [p for p in list_contexts(maker.final().parent) if f"-{round_}-" in p.name]
            assert {line.strip() for line in acknowledged} <= {path.name for path in published}
            assert len(published) <= len(acknowledged) + 1
            for path in published:
                open_it(path).close()
        assert forker.wait(timeout=30) == 0
    sweep(maker.root)
    assert list((maker.root / ".tmp").iterdir()) == []
    maker.context()


def test_case_b31_two_writers_and_a_reader_share_a_store(maker: Any) -> None:
    """Every file gets its map size once, before its first record: nothing ever grows a map."""
    opens = 0
    with (
        started("write", maker.root, "context-a", 4, 3000) as a,
        started("write", maker.root, "context-b", 4, 3000) as b,
    ):
        while a.poll() is None or b.poll() is None:
            for path in list_contexts(maker.root / "local"):
                open_it(path).close()
                opens += 1
            time.sleep(0.02)
        assert (a.returncode, b.returncode) == (0, 0)
    paths = list_contexts(maker.root / "local")
    assert len(paths) == 8 and opens > 0
    for number, path in enumerate(paths):
        with open_it(path) as context:
            written = maker.layer(number % 4, maker.fields(3000)).heads[0].keys
            assert context.layer(0).heads[0].keys.tobytes() == written.tobytes()


def test_case_b33_process_spawned_after_an_open_reads_the_same(context: Path) -> None:
    with open_it(context) as opened, started("digest", context) as reader:
        assert reader.communicate(timeout=60)[0].split() == [
            hashlib.sha256(opened.layer(layer).heads[0].keys.tobytes()).hexdigest()
            for layer in range(2)
        ]
        assert reader.returncode == 0
