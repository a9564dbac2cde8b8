"""An upload that breaks off is nothing, and one that is answered is all that was said of it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import grpc
import pytest

from openbook.server.documents import Documents
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .running import DOCUMENT, Held, active, ask, settle, text_of, until, upload

TRIES = 100


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_an_upload_without_a_digest_that_breaks_off_is_never_taken_for_a_whole_one(server, way):
    for number in range(TRIES):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(server.address, options=options)
        broken, sent = threading.Event(), threading.Event()

        def messages(number=number, broken=broken, sent=sent):
            yield from upload(DOCUMENT + b" %d" % number)
            sent.set()
            broken.wait(10)
            yield pb.IngestContextRequest(chunk=b"the rest")

        call = rpcs.ContextServiceStub(channel).IngestContext.future(messages(), timeout=20)
        assert sent.wait(10)
        time.sleep(0.001 * (number % 5))
        if way == "cancel":
            call.cancel()
        channel.close()
        broken.set()
    until(lambda: not server.app.service.running)
    until(lambda: not list((server.data / "uploads").iterdir()))
    assert not server.stub.ListContexts(pb.ListContextsRequest()).contexts
    assert text_of(ask(server, active(server).name, max_tokens=1))


def test_a_time_to_live_is_kept_though_its_caller_has_left(server, monkeypatch):
    held = Held(monkeypatch, Documents, "keep")
    metadata = {"ttl": timedelta(hours=1)}
    call = server.stub.IngestContext.future(upload(**metadata), timeout=20)
    assert held.arrived.wait(10)
    (life,) = (server.data / "lives").iterdir()  # on disk before the document is
    call.cancel()
    until(lambda: not server.app.service.running)
    held.gate.set()
    context = settle(server, f"contexts/{life.stem}")
    assert context.state == pb.CONTEXT_STATE_ACTIVE and context.HasField("expire_time")
