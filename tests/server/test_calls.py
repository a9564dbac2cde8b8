"""Every call ends in time, by the caller's deadline or by the server's."""

import threading
import time

import grpc
import pytest

from openbook.server.app import OPTIONS
from openbook.server.documents import Documents
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .running import DOCUMENT, Held, active, ask, ingest, refusal, text_of, until, upload

METHODS = tuple(pb.DESCRIPTOR.services_by_name["ContextService"].methods)


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_an_ask_ends_at_the_server_s_deadline_whatever_its_caller_allows(make_server, timeout):
    server = make_server(ask_deadline_s=1.5)
    context = active(server)
    server.engine.gate.clear()
    request = pb.AskRequest(context=context.name, question="who")
    status, reason, details = refusal(lambda: server.stub.Ask(request, timeout=timeout))
    assert (status, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED")
    assert details == {"limit_s": "1.5"}
    server.engine.gate.set()
    until(lambda: server.engine.asks[0].is_cancelled)
    until(lambda: server.app.decode.asks_running == 0)
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


def test_a_caller_s_own_deadline_ends_the_work(server):
    context = active(server)
    server.engine.gate.clear()
    request = pb.AskRequest(context=context.name, question="who")
    with pytest.raises(grpc.RpcError) as raised:
        list(server.stub.Ask(request, timeout=0.3))
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.app.decode.asks_running == 0)
    until(lambda: server.engine.asks[0].is_cancelled)


def test_an_upload_that_never_ends_is_ended_and_leaves_nothing(make_server):
    server = make_server(ingest_deadline_s=1.0)

    def slow():
        yield from upload(b"start")
        time.sleep(2)

    assert refusal(lambda: server.stub.IngestContext(slow()))[1] == "DEADLINE_PASSED"
    assert list((server.data / "uploads").iterdir()) == []


def test_an_upload_whose_caller_leaves_leaves_nothing(server):
    def slow():
        yield from upload(b"start")
        time.sleep(1)

    call = server.stub.IngestContext.future(slow())
    until(lambda: list((server.data / "uploads").iterdir()))
    call.cancel()
    until(lambda: not list((server.data / "uploads").iterdir()))


def test_an_upload_whose_caller_leaves_before_it_is_begun_leaves_nothing(server, monkeypatch):
    held = Held(monkeypatch, Documents, "receive")
    call = server.stub.IngestContext.future(upload())
    held.arrived.wait(10)
    call.cancel()
    until(lambda: any("CANCELLED" in fields.values() for _, _, fields in server.log.events))
    held.gate.set()
    held.left.wait(10)
    until(lambda: not list((server.data / "uploads").iterdir()))


def test_a_watch_without_a_deadline_gets_the_server_s(make_server):
    server = make_server(ingest_deadline_s=1.5)
    server.reading.gate.clear()
    context = ingest(server, DOCUMENT)
    request = pb.WatchContextRequest(name=context.name)
    assert refusal(lambda: server.stub.WatchContext(request))[1] == "DEADLINE_PASSED"


def test_case_b58_a_message_over_4_mib_is_refused_and_the_server_lives(server):
    context = active(server)
    with pytest.raises(grpc.RpcError) as raised:
        list(ask(server, context.name, "x" * ((4 << 20) + 1)))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_refused_by_name_and_the_server_lives(server, method):
    kinds = {
        (False, False): server.channel.unary_unary,
        (False, True): server.channel.unary_stream,
        (True, False): server.channel.stream_unary,
    }
    kind = kinds[method.client_streaming, method.server_streaming]
    call = kind(f"/openbook.v1.ContextService/{method.name}")
    garbage = b"\xff\xfe\x00garbage"
    request = iter([garbage]) if method.client_streaming else garbage
    status, reason, details = refusal(lambda: call(request, timeout=10))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ARGUMENT_INVALID")
    assert details == {"field": "request"}
    assert server.stub.ListModels(pb.ListModelsRequest()).models


def test_a_chunk_that_is_no_message_ends_the_upload_and_leaves_nothing(server):
    call = server.channel.stream_unary("/openbook.v1.ContextService/IngestContext")
    first, *_ = upload(b"")
    messages = iter([first.SerializeToString(), b"\xff\xff"])
    assert refusal(lambda: call(messages, timeout=10))[2] == {"field": "request"}
    assert list((server.data / "uploads").iterdir()) == []


def test_a_method_that_is_not_there_is_named_unimplemented(server):
    with pytest.raises(grpc.RpcError) as raised:
        server.channel.unary_unary("/openbook.v1.ContextService/Nothing")(b"", timeout=10)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_server_s_options_let_clients_ping_and_share_no_port():
    options = dict(OPTIONS)
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.so_reuseport"] == 0


@pytest.mark.slow
def test_case_b60_a_client_that_pings_each_ten_seconds_keeps_its_call(server):
    server.reading.gate.clear()
    context = ingest(server)
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(server.address, options=options) as channel:
        request = pb.WatchContextRequest(name=context.name)
        watching = iter(rpcs.ContextServiceStub(channel).WatchContext(request, timeout=120))
        next(watching)
        threading.Timer(65.0, server.reading.gate.set).start()
        *_, last = watching
    assert last.context.state == pb.CONTEXT_STATE_ACTIVE
