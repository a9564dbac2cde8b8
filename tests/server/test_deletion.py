"""A deleted context is gone at once, under whatever goes on, and never comes back."""

import threading

import grpc

from openbook.indexstore.errors import ContextInUse
from openbook.server import ingest_worker, ingests
from openbook.server.documents import Documents
from openbook.v1 import contexts_pb2 as pb

from .running import Held, active, ask, ingest, refusal, settle, text_of, until, upload


def test_a_deleted_context_is_gone_with_its_files_and_can_be_read_again(server):
    context = active(server, display_name="Light")
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    request = pb.GetContextRequest(name=context.name)
    assert refusal(lambda: server.stub.GetContext(request))[1] == "CONTEXT_UNKNOWN"
    context_id = context.name.removeprefix("contexts/")
    left = [path for path in server.data.rglob("*") if context_id in str(path)]
    assert left == []
    assert active(server).name == context.name
    assert len(server.reading.calls) == 2


def test_a_context_deleted_in_use_is_gone_for_new_asks_and_its_answer_goes_on(server):
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=4)
    until(lambda: server.engine.asks)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert refusal(lambda: ask(server, context.name))[:2] == (
        grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN",
    )  # fmt: skip
    server.call(server.app.ingests.sweep)
    assert left_in_trash(server)  # a reader has it
    server.engine.gate.set()
    assert text_of(answer) == "who-0 who-1 who-2 who-3 "
    until(lambda: not server.app.decode.asks_running)
    server.call(server.app.ingests.sweep)
    assert not left_in_trash(server)


def test_a_context_deleted_in_use_and_read_again_is_opened_anew(server):
    context = active(server)
    server.engine.gate.clear()
    old = ask(server, context.name, max_tokens=2)
    until(lambda: server.engine.asks)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert active(server).name == context.name
    new = ask(server, context.name, max_tokens=3)
    until(lambda: len(server.engine.asks) == 2)
    assert server.engine.loads == 2
    server.engine.gate.set()
    assert (text_of(old), text_of(new)) == ("who-0 who-1 ", "who-0 who-1 who-2 ")
    until(lambda: not server.app.decode.asks_running)
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert server.engine.loads == 2


def test_a_context_deleted_while_it_is_opened_is_unknown(server):
    context = active(server)
    server.engine.open_gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.app.opened.is_in_use(context.name.removeprefix("contexts/")))
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    server.engine.open_gate.set()
    assert refusal(lambda: answer)[:2] == (grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN")


def left_in_trash(server):
    return list((server.data / "contexts" / ".trash").iterdir())


def test_deleting_a_context_under_way_stops_its_reading(server):
    server.reading.gate.clear()
    context = ingest(server)
    until(lambda: server.reading.calls)
    watching = server.stub.WatchContext(pb.WatchContextRequest(name=context.name), timeout=20)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert refusal(lambda: watching)[1] == "CONTEXT_UNKNOWN"
    until(lambda: "ingest_cancelled" in server.log.names())
    assert list((server.data / "uploads").iterdir()) == []
    server.reading.gate.set()
    assert active(server).name == context.name


def test_a_context_deleted_and_uploaded_again_at_once_is_read(server):
    server.reading.gate.clear()
    context = ingest(server)
    until(lambda: server.reading.calls)
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert ingest(server).name == context.name
    server.reading.gate.set()
    assert settle(server, context.name).state == pb.CONTEXT_STATE_ACTIVE


def test_a_context_deleted_while_it_is_published_never_comes_back(make_server, monkeypatch):
    server = make_server()
    publishing = Held(monkeypatch, ingest_worker, "publish")
    name = Documents.name

    def name_late(*args):  # a deletion's last step: by now a publish that was under way has ended
        publishing.left.wait(10)
        threading.Event().wait(0.2)
        name(*args)

    context = ingest(server)
    publishing.arrived.wait(10)
    monkeypatch.setattr(Documents, "name", name_late)
    publishing.open_soon()
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    assert_gone(server, context, make_server)


def test_a_context_deleted_while_its_failure_is_noted_never_comes_back(make_server, monkeypatch):
    server = make_server()
    failing = Held(monkeypatch, Documents, "fail")
    context = ingest(server, b" ")
    failing.arrived.wait(10)
    failing.open_soon()
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    failing.left.wait(10)
    assert_gone(server, context, make_server)


def test_a_context_deleted_while_it_is_stored_leaves_nothing(make_server, monkeypatch):
    server = make_server()
    keeping = Held(monkeypatch, Documents, "keep")
    call = server.stub.IngestContext.future(upload(display_name="Light"))
    keeping.arrived.wait(10)
    (context,) = server.stub.ListContexts(pb.ListContextsRequest()).contexts
    keeping.open_soon()
    server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
    call.result(10)
    assert_gone(server, context, make_server)


def test_a_deletion_that_the_store_refuses_leaves_the_context(server, monkeypatch):
    context = active(server)

    def refuse(*_, **__):
        raise ContextInUse("elsewhere")

    with monkeypatch.context() as patch:
        patch.setattr(ingests, "delete", refuse)
        request = pb.DeleteContextRequest(name=context.name)
        assert refusal(lambda: server.stub.DeleteContext(request))[1] == "CONTEXT_IN_USE"
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


def assert_gone(server, context, make_server):
    """Hold that nothing of a context is left, now and after a restart."""
    request = pb.GetContextRequest(name=context.name)
    assert refusal(lambda: server.stub.GetContext(request))[1] == "CONTEXT_UNKNOWN"
    server.stop()
    context_id = context.name.removeprefix("contexts/")
    assert [path for path in server.data.rglob("*") if context_id in str(path)] == []
    again = make_server()
    assert list(again.stub.ListContexts(pb.ListContextsRequest()).contexts) == []
