"""Whatever Redis does, no ask is lost, no context is touched, and all is well again at once.

Each fault strikes while 200 short asks run through a whole server, against both real servers.
EVAL is used throughout, so NOSCRIPT cannot occur.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from openbook.server.errors import BrokerAway
from openbook.v1 import contexts_pb2 as pb

from .real_redis import delayed, found_redis
from .redis_harm import HARMS
from .running import active, ask, text_of

ASKS = 200
OPEN, CLOSED = 3, 5  # contexts that are open before the fault, and such as are opened during it
LEASE_TTL_S = 3.0
HEARTBEAT_S = LEASE_TTL_S / 3
CALL_S, NORMAL_S = 1.0, 3.0  # the promise: a call fails within the one, all is well in the other
FAULT_S = 1.2
JITTER_S = 0.3  # of two cores with other work on them


class Asked:
    """Asks in four threads, some of contexts that are opened then, until told to stop."""

    def __init__(self, server, names):
        self._server, self._names = server, names
        self.answered: list[str] = []
        self.lost: list[str] = []
        self.slowest_s = 0.0
        self._pace_s = 0.0
        self._pool = ThreadPoolExecutor(4)

    def run(self, count, seconds, *, late=()):
        """Make `count` asks over about `seconds`; those of `late` contexts are among them."""
        self._pace_s = seconds * 4 / count
        first = [*late, *self._names]
        names = first + [self._names[i % len(self._names)] for i in range(count - len(first))]
        list(self._pool.map(self._one, names))

    def close(self):
        self._pool.shutdown()

    def _one(self, name):
        started = time.monotonic()
        try:
            said = text_of(ask(self._server, name, max_tokens=2))
        except Exception as error:  # every way to lose an ask counts
            said = repr(error)
        spent_s = time.monotonic() - started
        self.slowest_s = max(self.slowest_s, spent_s)
        (self.answered if said == "who-0 who-1 " else self.lost).append(said)
        time.sleep(max(0.0, self._pace_s - spent_s))


def _digests(data):
    files = sorted(path for path in (data / "contexts" / "local").rglob("*") if path.is_file())
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _key(name):
    return f"openbook:lease:{{{name.removeprefix('contexts/')}}}"


def _call_s(server):
    """Return how long a call that needs Redis took, and whether it succeeded."""
    started = time.monotonic()
    try:
        server.call(lambda: server.app.broker.command("SET", "probe", "x", "PX", 1000))
    except BrokerAway:
        return time.monotonic() - started, False
    return time.monotonic() - started, True


def _seconds_until(holds, since, limit_s):
    while not holds():
        assert time.monotonic() - since < limit_s, f"not within {limit_s} s"
        time.sleep(0.01)
    return time.monotonic() - since


def _all_leased(redis_server, names):
    worker = None
    try:
        with redis_server.client(decode_responses=True) as client:
            for name in names:
                if client.type(_key(name)) != "string" or client.strlen(_key(name)) > 200:
                    return False
                holder, _, _ = client.get(_key(name)).rpartition(" ")
                worker = worker or holder
                if holder != worker or not 0 < client.pttl(_key(name)) <= LEASE_TTL_S * 1000:
                    return False
    except (redis.RedisError, AttributeError):  # it does not answer yet, or the key went just now
        return False
    return True


def strike(make_server, redis_server, url, harm):
    """Let a fault strike a server under 200 asks, hold it to the promise; return the figures."""
    server = make_server(redis_url=url, lease_ttl_s=LEASE_TTL_S)
    names = [active(server, f"document {i}".encode()).name for i in range(OPEN + CLOSED)]
    known, late = names[:OPEN], names[OPEN:]
    asked = Asked(server, known)
    asked.run(40, 0.2)
    _seconds_until(lambda: _all_leased(redis_server, known), time.monotonic(), NORMAL_S)
    before, loads = _digests(server.data), server.engine.loads
    keys = [_key(name) for name in known]

    harm.begin(redis_server, keys)
    ends = time.monotonic() + FAULT_S
    during = threading.Thread(target=asked.run, args=(120, FAULT_S), kwargs={"late": late})
    during.start()
    calls = [_call_s(server) for _ in range(3)]
    # A document that arrives meanwhile is read.
    arrived = active(server, b"it came during the fault").name
    while during.is_alive() or time.monotonic() < ends:
        calls.append(_call_s(server))
        harm.go_on(redis_server)
        time.sleep(0.05)
    during.join()
    assert server.engine.loads == loads + CLOSED  # opened from disk, during the fault
    harm.end(redis_server)
    returned = time.monotonic()
    normal_s = _seconds_until(lambda: _call_s(server)[1], returned, NORMAL_S)
    limit_s = max(HEARTBEAT_S, normal_s) + JITTER_S
    leases_s = _seconds_until(lambda: _all_leased(redis_server, names), returned, limit_s)
    asked.run(40, 0.2)
    asked.close()

    assert asked.lost == [] and len(asked.answered) == ASKS
    assert max(spent_s for spent_s, _ in calls) <= CALL_S
    assert any(is_done for _, is_done in calls) == harm.answers
    listed = server.stub.ListContexts(pb.ListContextsRequest()).contexts
    assert {context.name for context in listed} == {*names, arrived}
    assert {context.state for context in listed} == {pb.CONTEXT_STATE_ACTIVE}
    after = _digests(server.data)
    assert {file: after.get(file) for file in before} == before
    return (
        f"call {max(spent_s for spent_s, _ in calls):.2f} s, ask {asked.slowest_s:.2f} s, "
        f"normal after {normal_s:.2f} s, leases after {leases_s:.2f} s"
    )


@pytest.mark.parametrize("fault", [name for name, harm in HARMS.items() if not harm.is_slow])
def test_no_ask_is_lost_while_redis_is_at_fault(make_server, redis_server, fault):
    print(
        fault,
        redis_server.kind,
        strike(make_server, redis_server, redis_server.url, HARMS[fault]()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name, harm in HARMS.items() if harm.is_slow])
def test_no_ask_is_lost_whatever_redis_says(make_server, redis_server, fault):
    print(
        fault,
        redis_server.kind,
        strike(make_server, redis_server, redis_server.url, HARMS[fault]()),
    )


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.1, 0.4])
def test_no_ask_is_lost_while_redis_is_slow(make_server, redis_server, delay_s):
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever)
    running.start()

    def wait_for(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    proxy = delayed(redis_server, 0.0)
    url, delay = wait_for(proxy.__aenter__())

    class Slow:
        answers = delay_s < 0.2

        def begin(self, *_):
            delay[0] = delay_s

        def go_on(self, *_):
            pass

        def end(self, *_):
            delay[0] = 0.0

    try:
        print(f"{delay_s} s", redis_server.kind, strike(make_server, redis_server, url, Slow()))
    finally:
        wait_for(proxy.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        running.join()
        loop.close()


def test_a_server_starts_and_answers_with_the_wrong_password(make_server, redis_server, log):
    with redis_server.client() as client:
        client.config_set("requirepass", "right")
    server = make_server(redis_url=f"{redis_server.url}?password=wrong")
    assert text_of(ask(server, active(server).name, max_tokens=2)) == "who-0 who-1 "
    assert ("warning", "redis_away", {"error": "AuthenticationError"}) in log.events
    assert log.names().count("redis_away") == 1


def test_a_missing_redis_server_is_skipped_here_and_fails_in_continuous_integration(
    monkeypatch,
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        found_redis()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not installed"):
        found_redis()
