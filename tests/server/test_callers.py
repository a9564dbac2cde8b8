"""What one caller has under way never takes the last place of another."""

from __future__ import annotations

import threading

import grpc
import pytest

from openbook.server.callers import Callers
from openbook.server.errors import CallerLimitReached
from openbook.server.gate import Gate
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc as rpcs

from .running import DOCUMENT, RunningServer, active, ingest, refusal, text_of, until, upload

TOKENS = (b"a" * 32, b"b" * 32)
SHOWN = [(("authorization", f"Bearer {token.decode()}"),) for token in TOKENS]
REFUSED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT_REACHED")


def ask(server: RunningServer, name: str, stub: rpcs.ContextServiceStub | None = None, **call):
    request = pb.AskRequest(context=name, question="who keeps it", max_tokens=1)
    return (stub or server.stub).Ask(request, timeout=20, **call)


def other_stub(server: RunningServer) -> rpcs.ContextServiceStub:
    """Return a stub over a connection of its own: channels of one process else share one."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return rpcs.ContextServiceStub(grpc.insecure_channel(server.address, options=options))


def with_tokens(server: RunningServer) -> RunningServer:
    server.app.service.gate = Gate(TOKENS)
    return server


def under_way(server: RunningServer) -> int:
    return sum(server.app.service.callers._under_way.values())


def test_one_connection_leaves_places_for_asks_of_another(make_server):
    server = make_server(asks_per_caller_max=3)
    name = active(server).name
    server.engine.gate.clear()
    taken = [ask(server, name) for _ in range(3)]
    until(lambda: server.app.decode.asks_running == 3)
    status, reason, details = refusal(lambda: ask(server, name))
    assert (status, reason, details) == (*REFUSED, {"limit": "3"})
    mine = ask(server, name, other_stub(server))
    until(lambda: server.app.decode.asks_running == 4)
    assert server.stub.GetContext(pb.GetContextRequest(name=name)).context.name == name
    server.engine.gate.set()
    assert all(text_of(answer) for answer in (*taken, mine))
    assert text_of(ask(server, name))


def test_a_token_is_one_caller_over_any_number_of_connections(make_server):
    server = with_tokens(make_server(asks_per_caller_max=2))
    settled = server.stub.IngestContext(upload(), metadata=SHOWN[0], timeout=10).context
    watch = pb.WatchContextRequest(name=settled.name)
    list(server.stub.WatchContext(watch, metadata=SHOWN[0], timeout=10))
    server.engine.gate.clear()
    stubs = [server.stub, other_stub(server), other_stub(server)]
    taken = [ask(server, settled.name, stub, metadata=SHOWN[0]) for stub in stubs[:2]]
    until(lambda: server.app.decode.asks_running == 2)
    refused = refusal(lambda: ask(server, settled.name, stubs[2], metadata=SHOWN[0]))
    assert refused[:2] == REFUSED
    mine = ask(server, settled.name, metadata=SHOWN[1])  # the first one's connection
    until(lambda: server.app.decode.asks_running == 3)
    server.engine.gate.set()
    assert all(text_of(answer) for answer in (*taken, mine))


def test_one_caller_leaves_places_in_the_line_for_documents_of_another(make_server):
    server = make_server(ingests_per_caller_max=2)
    server.reading.gate.clear()
    mine = [ingest(server, DOCUMENT + bytes([65 + n])) for n in range(2)]
    status, reason, details = refusal(lambda: ingest(server, DOCUMENT + b"C"))
    assert (status, reason, details) == (*REFUSED, {"limit": "2"})
    assert ingest(server, DOCUMENT + b"A").name == mine[0].name  # in line already: no new place
    theirs = other_stub(server).IngestContext(upload(DOCUMENT + b"C"), timeout=10).context
    assert theirs.state == pb.CONTEXT_STATE_CREATING
    server.reading.gate.set()
    for context in (*mine, theirs):
        *_, last = server.stub.WatchContext(pb.WatchContextRequest(name=context.name), timeout=10)
        assert last.context.state == pb.CONTEXT_STATE_ACTIVE
    assert ingest(server, DOCUMENT + b"D").state == pb.CONTEXT_STATE_CREATING


def test_a_refused_document_leaves_nothing(make_server):
    server = make_server(ingests_per_caller_max=1)
    server.reading.gate.clear()
    ingest(server)
    assert refusal(lambda: ingest(server, DOCUMENT + b"B"))[:2] == REFUSED
    until(lambda: not list((server.data / "uploads").glob("*.part")))
    assert len(server.stub.ListContexts(pb.ListContextsRequest()).contexts) == 1


def test_uploads_that_do_not_end_are_bounded_for_each_caller(make_server):
    server = make_server(ingests_per_caller_max=2)

    ended = threading.Event()

    def endless():
        yield from upload(DOCUMENT)
        ended.wait(10)

    stuck = [server.stub.IngestContext.future(endless(), timeout=10) for _ in range(2)]
    until(lambda: under_way(server) == 4)
    assert refusal(lambda: ingest(server, DOCUMENT))[:2] == REFUSED
    assert other_stub(server).IngestContext(upload(DOCUMENT), timeout=10).context.name
    ended.set()
    for call in stuck:
        call.result(10)


def test_calls_of_every_kind_together_are_bounded_and_their_places_given_back(make_server):
    server = make_server(calls_per_caller_max=3)
    server.reading.gate.clear()
    name = ingest(server).name
    watches = [server.stub.WatchContext(pb.WatchContextRequest(name=name)) for _ in range(3)]
    for watch in watches:
        next(iter(watch))
    assert refusal(lambda: server.stub.ListModels(pb.ListModelsRequest()))[:2] == REFUSED
    watches[0].cancel()
    until(lambda: under_way(server) == 2)
    assert server.stub.ListModels(pb.ListModelsRequest()).models
    server.reading.gate.set()
    for watch in watches[1:]:
        list(watch)
    until(lambda: not server.app.service.callers._under_way)


@pytest.mark.parametrize("method", ["Ask", "GetContext"])
def test_a_place_comes_back_however_a_call_ends(method):
    callers = Callers(calls_max=2, most={"Ask": 1})
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), callers.calling("who", method):
            raise error
    with callers.calling("who", method), callers.calling("other", method):
        if method == "Ask":
            with pytest.raises(CallerLimitReached), callers.calling("who", method):
                raise AssertionError("the limit does not hold")
        with callers.calling("who", "GetContext"):
            with pytest.raises(CallerLimitReached), callers.calling("who", "GetContext"):
                raise AssertionError("the limit does not hold")
    assert not callers._under_way
