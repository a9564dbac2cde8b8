"""Contexts go when their time is over or room is needed, and never while they are read."""

import asyncio
import time
from datetime import timedelta

import grpc
import pytest

from openbook.indexstore.errors import StoreWriteFailed
from openbook.server.catalog import Entry, State
from openbook.server.collector import Collector
from openbook.v1 import contexts_pb2 as pb

from .running import DOCUMENT, KeptLog, active, ask, ingest, refusal, settle, text_of, until


def names(server):
    return {c.name for c in server.stub.ListContexts(pb.ListContextsRequest()).contexts}


def look(server):
    server.call(server.app.collector.look)


def update(server, name, **ttl):
    request = pb.UpdateContextRequest(name=name)
    if ttl:
        request.ttl.FromTimedelta(timedelta(**ttl))
    return server.stub.UpdateContext(request).context


def document(number):
    return DOCUMENT + b" %d" % number


def test_a_context_is_removed_when_its_time_is_over(server):
    kept, brief = active(server, document(1)), active(server, document(2), ttl={"nanos": 1})
    assert not kept.HasField("expire_time") and brief.HasField("expire_time")
    look(server)
    assert names(server) == {kept.name}
    assert refusal(lambda: ask(server, brief.name))[1] == "CONTEXT_UNKNOWN"
    left = [f"contexts/{path.stem}" for path in (server.data / "lives").iterdir()]
    assert left == [kept.name]


def test_an_update_sets_the_time_to_live_and_takes_it_back(server):
    context = active(server)
    before = time.time()
    updated = update(server, context.name, hours=1)
    assert before + 3599 < updated.expire_time.ToSeconds() < time.time() + 3601
    assert not update(server, context.name).HasField("expire_time")
    assert update(server, context.name, microseconds=1).name == context.name
    look(server)
    assert names(server) == set()
    assert refusal(lambda: update(server, context.name, hours=1))[1] == "CONTEXT_UNKNOWN"


def test_a_time_to_live_outlives_the_server(make_server):
    server = make_server()
    context = active(server)
    until_s = update(server, context.name, hours=2).expire_time.ToSeconds()
    server.stop()
    again = make_server()
    found = again.stub.GetContext(pb.GetContextRequest(name=context.name)).context
    assert abs(found.expire_time.ToSeconds() - until_s) <= 2


def test_a_use_makes_a_context_live_on(server):
    context = active(server)
    first = update(server, context.name, hours=1).expire_time.ToNanoseconds()
    text_of(ask(server, context.name, max_tokens=1))
    later = server.stub.GetContext(pb.GetContextRequest(name=context.name)).context.expire_time
    assert later.ToNanoseconds() > first
    ingest(server)
    again = server.stub.GetContext(pb.GetContextRequest(name=context.name)).context.expire_time
    assert again.ToNanoseconds() > later.ToNanoseconds()


def test_a_context_is_never_removed_while_it_answers(server):
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=2)
    until(lambda: server.engine.asks)
    update(server, context.name, microseconds=1)
    look(server)
    assert names(server) == {context.name}
    server.engine.gate.set()
    assert text_of(answer) == "who-0 who-1 "
    until(lambda: not server.app.decode.asks_running)
    look(server)
    assert names(server) == set()


def test_a_context_that_cannot_be_removed_keeps_no_other(server):
    stuck, other = (active(server, document(i), ttl={"nanos": i}) for i in (1, 2))
    genuine = server.app.ingests.delete

    async def delete(context_id):
        if stuck.name.endswith(context_id):
            raise StoreWriteFailed("manifest.json", "injected")
        await genuine(context_id)

    lives = server.app.collector._lives
    collector = Collector(
        server.app.catalog, lives, delete=delete, sweep=server.app.ingests.sweep,
        bytes_max=None, log=server.log,
    )  # fmt: skip
    server.call(collector.look)
    assert names(server) == {stuck.name}
    assert "collect_failed" in server.log.names()


def test_a_document_being_read_does_not_expire(server):
    server.reading.gate.clear()
    context = ingest(server, ttl={"nanos": 1_000_000})
    time.sleep(0.01)
    look(server)
    assert names(server) == {context.name}
    server.reading.gate.set()
    assert settle(server, context.name).state == pb.CONTEXT_STATE_ACTIVE


def test_over_its_bytes_the_store_drops_the_longest_unused_that_may_go(make_server):
    server = make_server()
    for_ever = active(server, document(0))
    mortal = [active(server, document(i), ttl={"seconds": 3600}) for i in (1, 2, 3)]
    text_of(ask(server, mortal[0].name, max_tokens=1))
    room = sum(c.bytes for c in (for_ever, *mortal)) - 1
    collector = server.app.collector
    tight = Collector(
        server.app.catalog,
        collector._lives,
        delete=server.app.ingests.collect,
        sweep=server.app.ingests.sweep,
        bytes_max=room,
        log=server.log,
    )
    server.call(tight.look)
    assert names(server) == {for_ever.name, mortal[0].name, mortal[2].name}
    server.call(tight.look)
    assert len(names(server)) == 3


def test_a_full_store_takes_no_document_and_answers_on(make_server):
    server = make_server(store_bytes_max=1)
    context = active(server)
    status, reason, details = refusal(lambda: ingest(server, document(1)))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORE_QUOTA_REACHED")
    assert details == {"limit": "1"}
    assert ingest(server).name == context.name, "a document that is there needs no room"
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    update(server, context.name, microseconds=1)
    look(server)
    assert active(server, document(1)).state == pb.CONTEXT_STATE_ACTIVE


@pytest.mark.parametrize("why", ["expired", "evicted"])
def test_a_context_that_is_kept_after_all_is_not_removed(why):
    class Catalogue:
        def __init__(self):
            self.found = {each: entry(each) for each in "abc"}

        def entries(self):
            return list(self.found.values())

        def find(self, context_id):
            return self.found.get(context_id)

    class Lived:
        ttl = dict.fromkeys("abc", 1.0)

        def expired(self, ids):
            return [each for each in ids if self.ttl[each]] if why == "expired" else []

        def ttl_s(self, context_id):
            return self.ttl[context_id]

        def by_use(self, ids):
            return sorted(ids)

    def entry(context_id):
        return Entry(context_id, "m", "completion", State.ACTIVE, 0.0, bytes=10)

    catalog, lives, removed = Catalogue(), Lived(), []

    async def delete(context_id):
        await asyncio.sleep(0)
        removed.append(context_id)
        del catalog.found[context_id]
        lives.ttl["b"] = None  # its user says to keep it, while the first one goes

    async def sweep():
        pass

    collector = Collector(catalog, lives, delete=delete, sweep=sweep, bytes_max=0, log=KeptLog())
    asyncio.run(collector.look())
    assert removed == ["a", "c"]
