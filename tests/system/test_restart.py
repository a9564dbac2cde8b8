"""A server with many contexts is ready soon after its model is, and what was left over is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
import uuid
from datetime import datetime
from pathlib import Path

import pytest

from openbook.indexstore.canonical import encode
from openbook.indexstore.store import begin, publish, read_manifest
from openbook.v1 import contexts_pb2 as pb
from openbook.worker import IngestSettings, ingest, load_model

from .serving import DOCUMENT, Served

READY_S = 2.0
LOADED = 3  # a machine with other work: the cut of `make test` allows so many times as much
ORPHANS = 20  # of each kind


def copied(context: Path, number: int) -> Path:
    """Publish a context once more, under another id and of another time; its shards are links."""
    manifest = read_manifest(context)
    copy = context.with_name(uuid.uuid4().hex)
    copy.mkdir(mode=0o700)
    for file in manifest.files:
        os.link(context / file.name, copy / file.name)
    created = manifest.created_unix_s - number // 3  # some are of the same second
    other = dataclasses.replace(manifest, context_id=copy.name, created_unix_s=created)
    (copy / "manifest.json").write_bytes(encode(other))
    (copy / "manifest.json").chmod(0o444)
    return copy


def filled(data: Path, context: Path, contexts: int) -> None:
    """Have as many contexts as told, each with a name and a life, in a stopped server's data."""
    life = json.dumps({"ttl_s": None, "used_unix_s": time.time()})
    for number in range(1, contexts):
        copy = copied(context, number)
        (data / "labels" / copy.name).write_text(f"Light {number}")
        (data / "lives" / f"{copy.name}.json").write_text(life)


def littered(data: Path, context: Path) -> list[Path]:
    """Leave behind what crashes may leave, and return the paths."""
    orphans = []
    for _ in range(ORPHANS):
        draft = data / "contexts" / ".tmp" / uuid.uuid4().hex  # killed while it was written
        shutil.copytree(context, draft, ignore=lambda *_: {"manifest.json"})
        buried = data / "contexts" / ".trash" / uuid.uuid4().hex  # killed while it was deleted
        shutil.copytree(context, buried)
        torn = data / "uploads" / f"{uuid.uuid4().hex}.part"  # killed while it arrived
        torn.write_bytes(b"x" * 4096)
        document = data / "uploads" / f"{uuid.uuid4().hex}.doc"  # without its record
        document.write_bytes(b"x" * 4096)
        name = data / "labels" / uuid.uuid4().hex  # of a context that was deleted
        name.write_text("Gone")
        life = data / "lives" / f"{uuid.uuid4().hex}.json"
        life.write_text(json.dumps({"ttl_s": 60.0, "used_unix_s": 1.0}))
        orphans += [draft, buried, torn, document, name, life]
    return orphans


def seconds_to_ready(log: Path) -> float:
    """Return the time from the model's load to the ready line of a log, which is just coming."""
    end = time.monotonic() + 10
    while True:
        events = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        at = {each["event"]: datetime.fromisoformat(each["timestamp"]) for each in events}
        if "ready" in at:
            return (at["ready"] - at["model_loaded"]).total_seconds()
        assert time.monotonic() < end, "it is not ready"
        time.sleep(0.02)


def pages(served: Served, size: int) -> list[pb.Context]:
    """Return every context, by pages of at most `size`."""
    found: list[pb.Context] = []
    request = pb.ListContextsRequest(page_size=size)
    while True:
        page = served.stub.ListContexts(request, timeout=10)
        assert len(page.contexts) == size or not page.next_page_token
        found += page.contexts
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def stored(model: Path, data: Path) -> Path:
    """Make a data directory with one context of a model, and return the context's directory."""
    data.mkdir(mode=0o700)
    (data / "secret").write_bytes(os.urandom(32))
    (data / "secret").chmod(0o600)
    for folder in ("uploads", "labels", "lives", "contexts", "contexts/local"):
        (data / folder).mkdir(mode=0o700)
    context = data / "contexts" / "local" / uuid.uuid4().hex
    with begin(data / "contexts") as draft:
        ingest(
            load_model(str(model)),
            DOCUMENT,
            draft,
            context_id=context.name,
            settings=IngestSettings("completion"),
            on_progress=lambda _: None,
            is_cancelled=lambda: False,
        )
        publish(draft, context)
    return context


def assert_ready_in_time(model: Path, folder: Path, contexts: int, limit_s: float) -> None:
    """Fill a data directory, litter it, start a server over it, and look at what is there."""
    data, log = folder / "data", folder / "log"
    context = stored(model, data)
    filled(data, context, contexts)
    orphans = littered(data, context)
    started = time.monotonic()
    served = Served(model, data, log)
    whole_s = time.monotonic() - started
    try:
        ready_s = seconds_to_ready(log)
        print(
            f"{contexts} contexts: {ready_s:.2f} s after the model's load, {whole_s:.1f} s in all"
        )
        assert ready_s <= limit_s
        assert not [path for path in orphans if path.exists()]
        found = pages(served, max(7, contexts // 9))
        names = {f"contexts/{path.name}" for path in context.parent.iterdir()}
        assert len(found) == len(names) == contexts
        assert {each.name for each in found} == names
        assert {each.state for each in found} == {pb.CONTEXT_STATE_ACTIVE}
        assert sum(each.display_name.startswith("Light ") for each in found) == contexts - 1
        ages = [each.create_time.ToSeconds() for each in found]
        assert ages == sorted(ages, reverse=True)
        assert len({served.ask(each.name)[0] for each in (found[0], found[-1])}) == 1
    finally:
        served.end(signal.SIGKILL)


def test_a_server_of_fifty_contexts_is_soon_ready_and_swept(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    assert_ready_in_time(tiny_model_directory, tmp_path, 50, LOADED * READY_S)


@pytest.mark.slow
def test_a_server_of_a_thousand_contexts_is_ready_within_two_seconds(
    tiny_model_directory: Path, tmp_path: Path
) -> None:
    served = Served(tiny_model_directory, tmp_path / "empty", tmp_path / "empty.log")
    empty_s = seconds_to_ready(tmp_path / "empty.log")
    served.end(signal.SIGKILL)
    print(f"no context: {empty_s:.2f} s after the model's load")
    assert_ready_in_time(tiny_model_directory, tmp_path, 1000, READY_S)
