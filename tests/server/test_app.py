"""A server finds everything again after a restart, and stops without breaking an answer."""

import shutil
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.server import app, broker
from openbook.server.app import StartRefused, bind
from openbook.server.settings import Settings
from openbook.server.start import Prepared
from openbook.server.valkey import EmbeddedValkey, ValkeyFailed
from openbook.v1 import contexts_pb2 as pb

from .fakes import FakeEngine, FakeModel
from .running import DOCUMENT, active, ask, ingest, refusal, settle, text_of, until


def listed(server):
    contexts = server.stub.ListContexts(pb.ListContextsRequest()).contexts
    return {context.name: context for context in contexts}


def test_case_b30_after_a_restart_contexts_answer_without_a_reading(make_server):
    first = make_server()
    context = active(first, display_name="Light")
    first.stop()
    again = make_server()
    assert listed(again) == {context.name: context}
    assert text_of(ask(again, context.name, max_tokens=2)) == "who-0 who-1 "
    assert ingest(again).state == pb.CONTEXT_STATE_ACTIVE
    assert again.reading.calls == []


def test_case_b28_a_document_under_way_is_read_after_a_restart(make_server):
    first = make_server()
    first.reading.gate.clear()
    context = ingest(first, display_name="Light")
    until(lambda: first.reading.calls)
    first.stop()
    assert list((first.data / "contexts" / ".tmp").iterdir()) == []
    again = make_server()
    done = settle(again, context.name)
    assert done.state == pb.CONTEXT_STATE_ACTIVE and done.display_name == "Light"
    until(lambda: not list((first.data / "uploads").iterdir()))


def test_stopping_is_no_attempt_but_a_crash_is(make_server):
    server = make_server()
    server.reading.gate.clear()
    context_id = ingest(server).name.removeprefix("contexts/")
    record = server.data / "uploads" / f"{context_id}.json"
    until(lambda: '"attempts":1' in record.read_text())
    server.stop()
    assert '"attempts":0' in record.read_text()


def test_a_document_that_took_the_server_down_three_times_is_not_read_again(make_server):
    server = make_server()
    server.reading.gate.clear()
    name = ingest(server).name
    server.stop()
    record = server.data / "uploads" / f"{name.removeprefix('contexts/')}.json"
    record.write_text(record.read_text().replace('"attempts":0', '"attempts":3'))
    again = make_server()
    assert settle(again, name).error.reason == "INGEST_CRASHED"
    assert again.reading.calls == []
    assert active(again, b"another").state == pb.CONTEXT_STATE_ACTIVE
    assert active(again).name == name  # a new upload gets new attempts


def test_a_failure_is_remembered_over_a_restart(make_server):
    server = make_server()
    name = settle(server, ingest(server, b" ").name).name
    server.stop()
    again = make_server()
    assert listed(again)[name].error.reason == "DOCUMENT_EMPTY"


def test_a_published_context_whose_upload_was_not_removed_yet_is_active(make_server):
    server = make_server()
    server.reading.gate.clear()
    name = ingest(server).name
    until(lambda: server.reading.calls)
    shutil.copytree(server.data / "uploads", server.data / "kept")
    server.reading.gate.set()
    settle(server, name)
    server.stop()
    shutil.rmtree(server.data / "uploads")
    (server.data / "kept").rename(server.data / "uploads")
    again = make_server()
    assert listed(again)[name].state == pb.CONTEXT_STATE_ACTIVE
    assert list((server.data / "uploads").iterdir()) == [] and again.reading.calls == []


def test_an_upload_for_another_model_waits_for_that_model(make_server):
    server = make_server()
    server.reading.gate.clear()
    name = ingest(server, display_name="Light").name
    server.stop()
    orphan = server.data / "labels" / ("0" * 32)
    orphan.write_text("of a context whose deletion a crash cut short")
    other = make_server(model=FakeModel("weights-b"))
    assert listed(other) == {} and not orphan.exists()
    other.stop()
    again = make_server()
    done = settle(again, name)
    assert done.state == pb.CONTEXT_STATE_ACTIVE and done.display_name == "Light"


def test_what_another_model_or_secret_left_is_counted_in_a_warning(make_server, log):
    server = make_server()
    active(server)
    settle(server, ingest(server, b" ").name)
    server.reading.gate.clear()
    ingest(server, b"waits")
    server.stop()
    assert "of_another_model_or_secret" not in log.names()
    make_server(model=FakeModel("weights-b"))
    (told,) = [event for event in log.events if event[1] == "of_another_model_or_secret"]
    assert told == ("warning", "of_another_model_or_secret", {"contexts": 1, "uploads": 2})


def test_a_context_of_another_model_is_refused_and_the_document_read_anew(make_server):
    server = make_server()
    old = active(server)
    server.stop()
    other = make_server(model=FakeModel("weights-b"))
    status, reason, _ = refusal(lambda: ask(other, old.name))
    assert (status, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FINGERPRINT_MISMATCH")
    assert active(other).name != old.name


def test_drain_lets_answers_end_and_refuses_new_ones(make_server):
    server = make_server()
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=3)
    until(lambda: server.engine.asks)
    watching = server.stub.WatchContext(pb.WatchContextRequest(name=context.name))
    server.drain()
    health = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest()
    until(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert refusal(lambda: ask(server, context.name))[:2] == (
        grpc.StatusCode.UNAVAILABLE, "DRAINING",
    )  # fmt: skip
    assert refusal(lambda: ingest(server))[1] == "DRAINING"
    server.engine.gate.set()
    assert text_of(answer) == "who-0 who-1 who-2 "
    server.stop()
    assert not server._thread.is_alive()
    watching.cancel()


def test_a_stop_that_waits_says_so_and_for_how_long(make_server, monkeypatch):
    monkeypatch.setattr(app, "TELL_S", 0.1)
    server = make_server(drain_s=60)
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=1)
    until(lambda: server.engine.asks)
    server.drain()
    until(lambda: server.log.names().count("draining") >= 3)
    server.engine.gate.set()
    assert text_of(answer) == "who-0 "
    first, *_, last = [fields for _, name, fields in server.log.events if name == "draining"]
    assert first == {"asks": 1, "calls": 1, "drain_s": 60.0} and last["drain_s"] < 60.0


def test_drain_ends_in_bounded_time_when_an_answer_does_not(make_server):
    server = make_server(drain_s=0.2)
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.engine.asks)
    server.drain()
    server._thread.join(10)
    assert not server._thread.is_alive()
    with pytest.raises(grpc.RpcError):
        list(answer)


def test_a_data_directory_of_another_shape_is_refused_in_one_line(data, monkeypatch):
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    monkeypatch.setattr(app, "capture_libraries", lambda _: None)
    monkeypatch.setattr(app, "load_model", lambda *_, **__: FakeModel())
    monkeypatch.setattr(app, "Engine", lambda model, **_: FakeEngine(model))
    (data / "uploads").write_text("put there after the start has looked")
    with pytest.raises(StartRefused, match="cannot be used") as refused:
        settings = Settings(data=data, model="fake", listen="127.0.0.1:0")
        app.run(settings, Prepared(b"s" * 32))
    assert "\n" not in str(refused.value)


def test_an_address_in_use_is_refused(server):
    async def run():
        with pytest.raises(StartRefused, match="in use"):
            bind(grpc.aio.server(options=[("grpc.so_reuseport", 0)]), server.address)

    import asyncio

    asyncio.run(run())


def test_a_stop_that_waits_for_an_answer_leaves_the_line_alone(server):
    import redis

    context = active(server)
    server.reading.gate.clear()
    ingest(server, b"another")
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=1)
    until(lambda: server.engine.asks and len(server.reading.calls) == 2)
    server.drain()
    until(lambda: "ingest_cancelled" in server.log.names())
    with redis.Redis(unix_socket_path=str(server.valkey.socket_path)) as client:
        before = client.info("commandstats")["cmdstat_eval"]["calls"]
        threading.Event().wait(0.3)
        after = client.info("commandstats")["cmdstat_eval"]["calls"]
    assert after - before < 10
    server.engine.gate.set()
    assert text_of(answer) == "who-0 "


def test_a_server_whose_valkey_does_not_start_serves_and_tries_again(make_server, monkeypatch):
    start = EmbeddedValkey.start
    comes = threading.Event()

    def start_late(self):
        if not comes.is_set():
            raise ValkeyFailed("not now")
        start(self)

    monkeypatch.setattr(EmbeddedValkey, "start", start_late)
    monkeypatch.setattr(broker, "WATCH_S", 0.05)
    server = make_server()
    context = active(server)
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert "valkey_failed" in server.log.names() and "valkey_started" not in server.log.names()
    comes.set()
    until(lambda: "redis_back" in server.log.names())


@pytest.mark.parametrize("loss", ["kill", "flush"])
def test_asks_and_ingests_go_on_without_redis(server, loss):
    gone = threading.Event()
    context = active(server)
    server.engine.gate.clear()
    running = ask(server, context.name, max_tokens=3)
    until(lambda: server.engine.asks)
    if loss == "kill":
        server.valkey.stop()
        server.valkey.start = gone.wait  # and it stays away
    else:
        import redis

        with redis.Redis(unix_socket_path=str(server.valkey.socket_path)) as client:
            client.flushall()
    server.engine.gate.set()
    assert text_of(running) == "who-0 who-1 who-2 "
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    assert active(server, b"another").token_count == 7
    gone.set()


def test_a_lease_is_held_while_a_context_is_open_and_released_at_the_end(server):
    import redis

    context = active(server)
    list(ask(server, context.name, max_tokens=1))
    key = f"openbook:lease:{{{context.name.removeprefix('contexts/')}}}"
    with redis.Redis(unix_socket_path=str(server.valkey.socket_path)) as client:
        until(lambda: client.get(key) is not None)
        server.stub.DeleteContext(pb.DeleteContextRequest(name=context.name))
        until(lambda: client.get(key) is None)


def test_the_event_loop_answers_while_a_context_is_opened_and_read(server):
    context = active(server)
    server.reading.gate.clear()
    ingest(server, b"another")
    server.engine.open_gate.clear()
    answer = ask(server, context.name, max_tokens=1)
    for _ in range(20):
        assert server.stub.GetContext(pb.GetContextRequest(name=context.name), timeout=1)
    server.engine.open_gate.set()
    assert text_of(answer) == "who-0 "


def test_leaves_no_thread_behind(make_server):
    before = set(threading.enumerate())
    server = make_server()
    list(ask(server, active(server, DOCUMENT).name, max_tokens=1))
    server.stop()
    until(lambda: not [t for t in threading.enumerate() if t not in before and not t.daemon])
