"""Documents come in once, and contexts go whole."""

import errno
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from openbook.indexstore.errors import StoreWriteFailed
from openbook.server import ingest_worker
from openbook.server.documents import Documents
from openbook.server.errors import StorageFull
from openbook.v1 import contexts_pb2 as pb

from .running import DOCUMENT, Held, active, ask, ingest, refusal, settle, text_of, until, upload


def test_a_document_becomes_a_context_that_answers(server):
    context = active(server, display_name="Light", prompt_layout=pb.PROMPT_LAYOUT_COMPLETION)
    assert context.display_name == "Light" and context.model == "fake/model"
    assert context.token_count == len(DOCUMENT) and context.bytes > 0
    assert context.prompt_layout == pb.PROMPT_LAYOUT_COMPLETION
    assert context.progress.stage == pb.INGEST_STAGE_DONE and context.timing.prefill_s == 0.2
    *deltas, last = ask(server, context.name, max_tokens=3)
    assert text_of(deltas) == "who-0 who-1 who-2 "
    assert last.final.finish_reason == pb.FINISH_REASON_LENGTH
    assert last.final.usage.answer_tokens == 3
    assert last.final.receipt.tokens_reused == len(DOCUMENT)
    assert last.final.receipt.budget == "keys=100+estimate"


def test_watch_tells_each_step_until_the_context_is_active(server):
    server.reading.gate.clear()
    context = ingest(server)
    assert context.state == pb.CONTEXT_STATE_CREATING
    watching = server.stub.WatchContext(pb.WatchContextRequest(name=context.name), timeout=20)
    stages = []
    for response in watching:
        stages.append(response.context.progress.stage)
        if response.context.progress.stage == pb.INGEST_STAGE_READING:
            server.reading.gate.set()
    assert pb.INGEST_STAGE_READING in stages and stages[-1] == pb.INGEST_STAGE_DONE


def test_case_b28_a_context_under_way_cannot_be_asked(server):
    server.reading.gate.clear()
    context = ingest(server)
    status, reason, _ = refusal(lambda: ask(server, context.name))
    assert (status, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONTEXT_NOT_READY")


def test_the_same_document_again_is_the_same_context_without_a_reading(server):
    first = active(server)
    again = ingest(server)
    assert again.name == first.name and again.state == pb.CONTEXT_STATE_ACTIVE
    assert len(server.reading.calls) == 1
    assert list((server.data / "uploads").iterdir()) == []


def test_sixteen_callers_at_once_share_one_reading(server):
    server.reading.gate.clear()
    names = []
    threads = [
        threading.Thread(target=lambda: names.append(ingest(server).name)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.reading.gate.set()
    assert len(set(names)) == 1 and settle(server, names[0]).state == pb.CONTEXT_STATE_ACTIVE
    assert len(server.reading.calls) == 1


@pytest.mark.parametrize("announced", [b"", hashlib.sha256(DOCUMENT).digest()])
@pytest.mark.parametrize("is_full", [False, True])
def test_no_caller_is_answered_before_the_document_is_on_disk(
    server, monkeypatch, announced, is_full
):
    keep = Documents.keep
    if is_full:
        monkeypatch.setattr(Documents, "keep", full_disk)
    held = Held(monkeypatch, Documents, "keep")
    first = server.stub.IngestContext.future(upload())
    held.arrived.wait(10)
    second = server.stub.IngestContext.future(upload(sha256=announced))
    with pytest.raises(grpc.FutureTimeoutError):
        second.result(0.3)
    monkeypatch.setattr(Documents, "keep", keep)
    held.gate.set()
    if is_full:
        assert refusal(lambda: first.result(10))[1] == "STORE_FULL"
    name = second.result(10).context.name  # stored by the second caller, if not by the first
    assert settle(server, name).state == pb.CONTEXT_STATE_ACTIVE


def test_layout_and_one_more_byte_make_other_contexts(server):
    names = {
        active(server, prompt_layout=pb.PROMPT_LAYOUT_CHAT).name,
        active(server, prompt_layout=pb.PROMPT_LAYOUT_COMPLETION).name,
        active(server, DOCUMENT + b" ", prompt_layout=pb.PROMPT_LAYOUT_CHAT).name,
    }
    assert len(names) == 3


def test_a_document_goes_on_being_read_when_its_caller_leaves(server):
    server.reading.gate.clear()
    context = ingest(server)
    watching = server.stub.WatchContext(pb.WatchContextRequest(name=context.name))
    next(iter(watching))
    watching.cancel()
    server.reading.gate.set()
    assert settle(server, context.name).state == pb.CONTEXT_STATE_ACTIVE


@pytest.mark.parametrize(
    ("document", "reason"), [(b"", "DOCUMENT_EMPTY"), (b"x" * 601, "DOCUMENT_TOO_LONG")]
)
def test_a_document_that_cannot_be_read_fails_with_its_reason(server, document, reason):
    context = settle(server, ingest(server, document).name)
    assert context.state == pb.CONTEXT_STATE_FAILED and context.error.reason == reason
    status, asked, _ = refusal(lambda: ask(server, context.name))
    assert (status, asked) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert active(server).state == pb.CONTEXT_STATE_ACTIVE  # the next one is served


def test_a_failed_context_can_be_ingested_again(server):
    server.reading.error = RuntimeError("about " + DOCUMENT.decode())
    context = settle(server, ingest(server).name)
    assert context.error.reason == "INTERNAL" and "keeper" not in context.error.message
    server.reading.error = None
    assert active(server).name == context.name


def test_an_upload_with_another_digest_is_refused_and_leaves_nothing(server):
    other = hashlib.sha256(b"other").digest()
    status, reason, _ = refusal(lambda: ingest(server, sha256=other))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_MISMATCH")
    assert list((server.data / "uploads").iterdir()) == []
    assert active(server, sha256=hashlib.sha256(DOCUMENT).digest()).token_count == len(DOCUMENT)


def test_an_upload_over_the_limit_is_refused_while_it_arrives(make_server):
    server = make_server(document_bytes_max=1000)
    status, reason, details = refusal(lambda: ingest(server, b"x" * 1001))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "DOCUMENT_OVERSIZED")
    assert details == {"limit": "1000"}
    assert list((server.data / "uploads").iterdir()) == []
    assert ingest(server, b"x" * 1000).state == pb.CONTEXT_STATE_CREATING


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "ARGUMENT_INVALID"),
        ([pb.IngestContextRequest(chunk=b"x")], "ARGUMENT_INVALID"),
        ([*upload(b""), *upload(b"")], "ARGUMENT_INVALID"),
        ([*upload(b"x" * (1 << 20) + b"y", chunk=(1 << 20) + 1)], "CHUNK_OVERSIZED"),
        ([*upload(b"", sha256=b"short")], "ARGUMENT_INVALID"),
        ([*upload(b"", display_name="x" * 1025)], "ARGUMENT_INVALID"),
        ([*upload(b"", display_name="a\x1b[31m")], "ARGUMENT_INVALID"),
        ([*upload(b"", prompt_layout=7)], "ARGUMENT_INVALID"),
        ([*upload(b"", model="other/model")], "MODEL_UNKNOWN"),
        ([*upload(b"", ttl={"seconds": 0})], "ARGUMENT_INVALID"),
        ([*upload(b"", ttl={"seconds": -60})], "ARGUMENT_INVALID"),
        ([*upload(b"", ttl={"seconds": 1 << 40})], "ARGUMENT_INVALID"),
    ],
)
def test_a_wrong_upload_is_refused(server, messages, reason):
    assert refusal(lambda: server.stub.IngestContext(iter(messages), timeout=10))[1] == reason
    assert list((server.data / "uploads").iterdir()) == []


def test_too_many_waiting_documents_are_refused(make_server):
    server = make_server(ingests_waiting_max=2)
    server.reading.gate.clear()
    for document in (b"one", b"two"):
        ingest(server, document)
    status, reason, _ = refusal(lambda: ingest(server, b"three"))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "INGEST_QUEUE_FULL")
    assert ingest(server, b"two").state == pb.CONTEXT_STATE_CREATING  # that one waits already


def test_documents_that_arrive_at_once_never_pass_the_limit(make_server, monkeypatch):
    server = make_server(ingests_waiting_max=2)
    server.reading.gate.clear()
    held = Held(monkeypatch, Documents, "keep")
    held.open_soon()

    def reason(number):
        try:
            return ingest(server, b"document %d" % number).state
        except grpc.RpcError as error:
            return error.code()

    with ThreadPoolExecutor(6) as callers:
        ends = list(callers.map(reason, range(6)))
    assert ends.count(pb.CONTEXT_STATE_CREATING) == 2
    assert ends.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 4


def test_a_full_line_answers_for_the_documents_it_knows(make_server):
    server = make_server(ingests_waiting_max=1, uploads_max=1)
    known = active(server, b"known")
    until(lambda: not server.app.ingests._queue.waiting_count)  # a moment after it is ACTIVE
    server.reading.gate.clear()
    waiting = ingest(server, b"waits")
    assert ingest(server, b"known").name == known.name
    assert ingest(server, b"waits").name == waiting.name
    with Unending(server):  # the only upload that may be under way
        assert refusal(lambda: ingest(server, b"known"))[1] == "INGEST_QUEUE_FULL"
        for document, name in ((b"known", known.name), (b"waits", waiting.name)):
            assert ingest(server, document, sha256=digest(document)).name == name


def test_a_full_line_refuses_an_announced_document_before_it_is_sent(make_server):
    server = make_server(ingests_waiting_max=1)
    server.reading.gate.clear()
    ingest(server, b"waits")
    unending = Unending(server, sha256=digest(b"new"))
    status, reason, _ = refusal(unending.call.result)
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "INGEST_QUEUE_FULL")
    unending.__exit__()


def test_uploads_at_once_are_bounded_and_each_end_makes_room(make_server):
    server = make_server(uploads_max=1)
    with Unending(server):
        status, reason, details = refusal(lambda: ingest(server))
        assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "INGEST_QUEUE_FULL")
        assert details == {"limit": "1"}
    until(lambda: not list((server.data / "uploads").iterdir()))
    for _ in range(2):
        assert refusal(lambda: ingest(server, sha256=digest(b"x")))[1] == "DIGEST_MISMATCH"
    assert active(server).state == pb.CONTEXT_STATE_ACTIVE


def test_a_context_is_as_old_as_its_upload(server):
    context = active(server)
    assert server.reading.created_unix_s == [context.create_time.seconds]


def full_disk(*_, **__):
    raise StorageFull()


def digest(document):
    return hashlib.sha256(document).digest()


class Unending:
    """An upload under way whose last byte never comes."""

    def __init__(self, server, **metadata):
        self.over = threading.Event()

        def messages():
            yield from upload(b"start", **metadata)
            self.over.wait(20)

        self.call = server.stub.IngestContext.future(messages())
        self.server = server

    def __enter__(self):
        until(lambda: list((self.server.data / "uploads").glob("*.part")))

    def __exit__(self, *_):
        self.call.cancel()
        self.over.set()


def test_a_document_is_not_given_up_for_files_that_others_hold_open(server, monkeypatch):
    monkeypatch.setattr(ingest_worker, "RETRY_S", 0.01)
    server.reading.error = StoreWriteFailed("layer-000.mdb", "Too many open files")
    server.reading.error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    name = ingest(server).name
    until(lambda: server.log.names().count("ingest_put_off") > 5)  # far more than ATTEMPTS_MAX
    server.reading.error = None
    assert settle(server, name).state == pb.CONTEXT_STATE_ACTIVE
