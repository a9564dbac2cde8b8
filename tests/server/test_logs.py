"""No word of a document or a question gets into logs, errors or Redis."""

import io
import json
import logging
import sys
import threading
import time

import grpc
import pytest
import redis

from openbook.server import logs
from openbook.server.logs import LibraryHandler, Lines, fault_fields, open_log

from .running import active, ask, ingest, refusal, settle

CANARY = "xyzzy-canary"


def dump(socket_path):
    """Return everything that Redis holds, as one text."""
    with redis.Redis(unix_socket_path=str(socket_path), decode_responses=True) as client:
        found = []
        for key in client.scan_iter():
            kind = client.type(key)
            read = {
                "string": client.get,
                "hash": client.hgetall,
                "stream": lambda k: client.xrange(k),
            }[kind]
            found.append(f"{key} {read(key)}")
        return "\n".join(found)


def test_no_text_of_a_user_in_logs_errors_or_redis(server):
    document = f"The {CANARY} walks the stair.".encode()
    context = active(server, document, display_name=CANARY)
    server.reading.gate.clear()
    ingest(server, document + b"2", display_name=CANARY)
    seen = dump(server.valkey.socket_path)
    assert "openbook:" in seen  # it did look
    errors = []
    for question in (CANARY, f"explode {CANARY}", f"fail {CANARY}", CANARY * 100_000):
        try:
            list(ask(server, context.name, question, max_tokens=2, stop=[CANARY]))
        except grpc.RpcError as error:
            errors.append(f"{error.details()} {error.trailing_metadata()}")
    for fields in ({"session": CANARY}, {"max_tokens": -1}):
        errors.append(refusal(lambda f=fields: ask(server, context.name, CANARY, **f)))
    server.reading.error = RuntimeError(CANARY)
    server.reading.gate.set()
    errors.append(settle(server, ingest(server, document + b"3").name).error)
    seen += dump(server.valkey.socket_path)
    assert CANARY not in seen
    assert len(errors) >= 6 and CANARY not in str(errors)
    assert server.log.events and CANARY not in str(server.log.events)


def test_a_log_line_is_json_with_level_and_time():
    stream = io.StringIO()
    open_log(stream).info("ready", context="a" * 32, ms=1.5)
    line = json.loads(stream.getvalue())
    assert line["event"] == "ready" and line["level"] == "info" and line["ms"] == 1.5
    assert line["timestamp"].endswith("Z")


def test_another_library_s_words_are_reduced_to_where_they_came_from(log):
    logger = logging.getLogger("some.library")
    handler = LibraryHandler(log)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        try:
            raise ValueError(CANARY)
        except ValueError:
            logger.exception("while reading %s", CANARY)
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    ((level, event, fields),) = log.events
    assert (level, event, fields["logger"]) == ("warning", "library", "some.library")
    assert fields["error"] == "ValueError" and CANARY not in str(log.events)


def test_a_fault_is_named_by_class_and_place():
    with pytest.raises(KeyError) as raised:
        {}[CANARY]
    fields = fault_fields(raised.value)
    assert fields["error"] == "KeyError" and fields["where"].startswith("test_logs.py:")
    assert CANARY not in str(fields)


def test_what_no_one_caught_is_named_and_not_quoted(log, monkeypatch):
    from openbook.server.logs import capture_libraries

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    capture_libraries(log)
    logging.captureWarnings(False)

    def fail():
        raise RuntimeError(CANARY)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    sys.excepthook(RuntimeError, RuntimeError(CANARY), None)
    assert log.names() == ["uncaught_in_thread", "uncaught"] and CANARY not in str(log.events)


def test_a_library_that_writes_by_itself_is_made_to_speak_through_the_log(log, monkeypatch):
    from openbook.server.logs import capture_libraries

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    stream = io.StringIO()
    logger = logging.getLogger("loud.library")
    logger.addHandler(logging.StreamHandler(stream))
    logger.propagate = False
    capture_libraries(log)
    logging.captureWarnings(False)
    logger.warning("a report of\nmany lines about %s", CANARY)
    assert stream.getvalue() == ""
    assert [fields["logger"] for _, _, fields in log.events] == ["loud.library"]


@pytest.mark.parametrize("error", [BrokenPipeError, OSError])
def test_a_log_that_cannot_be_written_stops_nobody(error):
    written, faults = [], [error()]

    def write(content):
        if faults:
            raise faults.pop()
        written.append(json.loads(content)["event"])

    lines = Lines(write)
    log = open_log(lines)
    for event in ("lost", "kept"):
        log.info(event)
        lines.drain()
    assert written == ["kept"]


def test_a_log_whose_reader_stalls_holds_up_nobody_and_counts_what_is_lost(monkeypatch):
    monkeypatch.setattr(logs, "LINES_WAITING_MAX", 5)
    free, written = threading.Event(), []

    def write(content):
        assert free.wait(10)
        written.append(json.loads(content))

    lines = Lines(write)
    log = open_log(lines)
    started = time.monotonic()
    for number in range(20):
        log.info("line", number=number)
    lines.drain(0.05)
    assert time.monotonic() - started < 2
    free.set()
    lines.drain()
    log.info("after")
    lines.drain()
    (lost,) = (event["count"] for event in written if event["event"] == "log_lines_lost")
    assert sum(event["event"] == "line" for event in written) + lost == 20
    assert written[-1]["event"] == "after"
