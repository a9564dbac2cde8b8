"""A context is indexed anew beside its answers, and nothing is left of a try that ends early."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.indexstore.errors import ContextMissing, StoreFull
from openbook.server import service, upkeep
from openbook.server.errors import ContextUnknown
from openbook.v1 import contexts_pb2 as pb

from .running import Held, active, ask, refusal, text_of, until
from .test_opened import directory, flip


def reindex(server, name):
    return server.stub.ReindexContext(pb.ReindexContextRequest(name=name), timeout=20)


def drafts(server):
    return list((server.data / "contexts" / ".tmp").iterdir())


def test_new_asks_read_the_new_files_and_running_ones_keep_theirs(server):
    context = active(server)
    server.engine.gate.clear()
    running = ask(server, context.name, max_tokens=3)
    until(lambda: server.engine.asks)
    before = (directory(server, context) / "manifest.json").stat().st_ino
    indexed = reindex(server, context.name).context
    assert (indexed.name, indexed.state) == (context.name, pb.CONTEXT_STATE_ACTIVE)
    assert indexed.create_time == context.create_time
    assert (directory(server, context) / "manifest.json").stat().st_ino != before
    late = ask(server, context.name, max_tokens=1)
    until(lambda: len(server.engine.asks) == 2)
    assert server.engine.loads == 2
    server.engine.gate.set()
    assert (text_of(running), text_of(late)) == ("who-0 who-1 who-2 ", "who-0 ")
    until(lambda: not server.app.decode.asks_running)
    server.call(server.app.ingests.sweep)
    assert drafts(server) == []


def test_a_context_deleted_meanwhile_is_unknown_and_stays_gone(server, monkeypatch):
    context = active(server)
    held = Held(monkeypatch, upkeep, "reindex")
    call = server.stub.ReindexContext.future(pb.ReindexContextRequest(name=context.name))
    assert held.arrived.wait(10)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    held.gate.set()
    assert refusal(lambda: call.result(10))[1] == "CONTEXT_UNKNOWN"
    assert not directory(server, context).exists() and drafts(server) == []


def test_a_caller_that_leaves_leaves_nothing(server, monkeypatch):
    context = active(server)
    held = Held(monkeypatch, upkeep, "reindex")
    call = server.stub.ReindexContext.future(pb.ReindexContextRequest(name=context.name))
    assert held.arrived.wait(10)
    call.cancel()
    until(lambda: not server.app.service.running)
    held.gate.set()
    until(lambda: drafts(server) == [])
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


def test_one_is_indexed_at_a_time_and_too_many_are_refused(server, monkeypatch):
    monkeypatch.setattr(upkeep, "WAITING_MAX", 2)
    context = active(server)
    held = Held(monkeypatch, upkeep, "reindex")
    request = pb.ReindexContextRequest(name=context.name)
    first, second = (server.stub.ReindexContext.future(request) for _ in range(2))
    until(lambda: server.app.service.running == 2)
    assert held.arrived.wait(10) and len(drafts(server)) == 1
    status, reason, _ = refusal(lambda: reindex(server, context.name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "INGEST_QUEUE_FULL")
    held.gate.set()
    assert first.result(10).context.name == second.result(10).context.name == context.name


def test_damage_is_named_and_noted(server):
    context = active(server)
    flip(directory(server, context) / "layer-001.mdb")
    assert refusal(lambda: reindex(server, context.name))[:2] == (
        grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT",
    )  # fmt: skip
    assert drafts(server) == []
    request = pb.GetContextRequest(name=context.name)
    assert server.stub.GetContext(request).context.state == pb.CONTEXT_STATE_FAILED


@pytest.mark.parametrize("step", ["reindex", "replace"])
def test_a_full_disk_leaves_the_old_one(server, monkeypatch, step):
    context = active(server)

    def full(*_, **__):
        raise StoreFull("layer-000.mdb", "injected")

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, step, full)
        status, _, _ = refusal(lambda: reindex(server, context.name))
        assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert drafts(server) == []
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert reindex(server, context.name).context.state == pb.CONTEXT_STATE_ACTIVE


def test_verifications_and_counts_have_their_own_bounds_and_hold_up_nobody(server, monkeypatch):
    context = active(server)
    monkeypatch.setattr(service, "count_tokens", lambda *_: 5)
    counting = Held(monkeypatch, service, "count_tokens")
    verifying = Held(monkeypatch, upkeep, "verify_context")
    count = pb.CountTokensRequest(document=b"a text")
    verify = pb.VerifyContextRequest(name=context.name)
    calls = [server.stub.CountTokens.future(count) for _ in range(service.COUNTS_WAITING_MAX)]
    calls += [server.stub.VerifyContext.future(verify) for _ in range(upkeep.WAITING_MAX)]
    assert counting.arrived.wait(10) and verifying.arrived.wait(10)
    until(lambda: server.app.service.running == len(calls))
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLS_FULL")
    assert refusal(lambda: server.stub.CountTokens(count))[:2] == full
    assert refusal(lambda: server.stub.VerifyContext(verify))[:2] == full
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    server.call(server.app.health.tell)
    health = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    counting.gate.set()
    verifying.gate.set()
    for call in calls:
        call.result(10)
    assert server.stub.CountTokens(count) and server.stub.VerifyContext(verify)


def test_what_was_met_in_a_context_that_is_gone_is_not_held_against_the_next_one(server):
    old = server.app.catalog.get(active(server).name.partition("/")[2])
    server.stub.DeleteContext(pb.DeleteContextRequest(name=f"contexts/{old.context_id}"))
    again = active(server)
    assert again.name.endswith(old.context_id)
    with pytest.raises(ContextUnknown):
        server.call(lambda: server.app.service._upkeep.damaged(old, ContextMissing("gone")))
    assert text_of(ask(server, again.name, max_tokens=1)) == "who-0 "
