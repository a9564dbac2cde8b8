"""Sixteen callers send one document at once to a real server: one context, one prefill."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import grpc
import pytest

from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .serving import DOCUMENT, Served

CALLERS = 16


@pytest.fixture
def served(tiny_model_directory: Path, tmp_path: Path) -> Iterator[Served]:
    server = Served(tiny_model_directory, tmp_path / "data", tmp_path / "log")
    yield server
    server.end(signal.SIGKILL)


@pytest.mark.slow  # the cut is over a fake model, in tests/server
def test_sixteen_callers_at_once_are_one_context_and_one_prefill(served: Served) -> None:
    start = Barrier(CALLERS)

    def call() -> tuple[str, int, int]:
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all share one connection
        with grpc.insecure_channel(served.address, options=options) as channel:
            stub = rpcs.ContextServiceStub(channel)
            messages = [
                pb.IngestContextRequest(
                    metadata=pb.IngestContextRequest.Metadata(
                        prompt_layout=pb.PROMPT_LAYOUT_COMPLETION
                    )
                ),
                pb.IngestContextRequest(chunk=DOCUMENT),
            ]
            start.wait(10)
            name = stub.IngestContext(iter(messages), timeout=60).context.name
            *_, last = stub.WatchContext(pb.WatchContextRequest(name=name), timeout=60)
            return name, last.context.state, last.context.token_count

    with ThreadPoolExecutor(CALLERS) as pool:
        ends = {future.result() for future in [pool.submit(call) for _ in range(CALLERS)]}
    ((name, state, token_count),) = ends
    assert state == pb.CONTEXT_STATE_ACTIVE
    local = served.data / "contexts" / "local"
    assert [path.name for path in local.iterdir()] == [name.rpartition("/")[2]]
    assert served.tokens_forwarded() == token_count
    assert served.ingest().name == name
    assert served.tokens_forwarded() == token_count
    other = served.ingest(DOCUMENT + b" Again.")  # one prefill is what one document costs
    assert served.tokens_forwarded() == token_count + other.token_count
