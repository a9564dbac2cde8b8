"""Every method of the interface over a real gRPC connection, with the model faked."""

import hashlib
import threading
import time

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from openbook.server.asks import NOT_SERVED, SERVED
from openbook.server.errors import DOMAIN
from openbook.v1 import contexts_pb2 as pb

DOCUMENT = b"The keeper of the light walks the long stair each night."
UNKNOWN = "contexts/" + "0" * 32


def upload(document=DOCUMENT, chunk=1 << 20, **metadata):
    yield pb.IngestContextRequest(metadata=pb.IngestContextRequest.Metadata(**metadata))
    for start in range(0, len(document), chunk):
        yield pb.IngestContextRequest(chunk=document[start : start + chunk])


def ingest(server, document=DOCUMENT, **metadata):
    return server.stub.IngestContext(upload(document, **metadata), timeout=10).context


def settle(server, name):
    seen = list(server.stub.WatchContext(pb.WatchContextRequest(name=name), timeout=20))
    return seen[-1].context


def active(server, document=DOCUMENT, **metadata):
    context = settle(server, ingest(server, document, **metadata).name)
    assert context.state == pb.CONTEXT_STATE_ACTIVE, context.error
    return context


def ask(server, name, question="who keeps it", **fields):
    request = pb.AskRequest(context=name, question=question, **fields)
    return server.stub.Ask(request, timeout=20)


def text_of(responses):
    return "".join(r.delta for r in responses if r.HasField("delta"))


def refusal(call):
    """Return (status, reason, details) of the error that a call ends with."""
    with pytest.raises(grpc.RpcError) as raised:
        result = call()
        list(result) if hasattr(result, "__iter__") else result
    status = rpc_status.from_call(raised.value)
    assert status is not None, raised.value
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info) and info.domain == DOMAIN
    return raised.value.code(), info.reason, dict(info.metadata)


def until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


# Ingest


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
        ([*upload(b"", ttl={"seconds": 60})], "NOT_SUPPORTED_YET"),
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


# Contexts


@pytest.mark.parametrize(
    "name",
    [
        "", "contexts/", "contexts/" + "a" * 600, "contexts/../../etc/passwd",
        "contexts/..%2f..%2fetc", "/etc/passwd", "contexts/a\x00b", "contexts/\U0001f4d6",
        "contexts/.tmp/" + "a" * 32, "x" * 10240, "contexts/" + "a" * 32 + "\n",
        "contexts/\x1b[31m" + "a" * 27, "contexts/" + "A" * 32, "contexts/" + "\u0430" * 32,
        "contexts/" + "\u0661" * 32, "a" * 32,
    ],
)  # fmt: skip
def test_case_b35_a_hostile_name_is_refused_by_every_method(server, name):
    calls = [
        lambda: server.stub.GetContext(pb.GetContextRequest(name=name)),
        lambda: server.stub.DeleteContext(pb.DeleteContextRequest(name=name)),
        lambda: server.stub.WatchContext(pb.WatchContextRequest(name=name)),
        lambda: ask(server, name),
    ]
    for call in calls:
        status, reason, details = refusal(call)
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NAME_INVALID")
        assert details == {}


def test_an_unknown_context_is_not_found_by_every_method(server):
    calls = [
        lambda: server.stub.GetContext(pb.GetContextRequest(name=UNKNOWN)),
        lambda: server.stub.DeleteContext(pb.DeleteContextRequest(name=UNKNOWN)),
        lambda: server.stub.WatchContext(pb.WatchContextRequest(name=UNKNOWN)),
        lambda: ask(server, UNKNOWN),
    ]
    for call in calls:
        assert refusal(call)[:2] == (grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN")


def test_lists_page_by_page_newest_first_without_loss(server):
    names = [active(server, b"document %d" % i).name for i in range(5)]
    listed, token = [], ""
    while True:
        page = server.stub.ListContexts(pb.ListContextsRequest(page_size=2, page_token=token))
        listed += [context.name for context in page.contexts]
        token = page.next_page_token
        if not token:
            break
        assert len(page.contexts) == 2
    assert sorted(listed) == sorted(names) and len(set(listed)) == 5


def test_a_wrong_page_token_or_size_is_refused(server):
    for token in ("x", "\u00e9", "AAAA", "a" * 5000):
        request = pb.ListContextsRequest(page_token=token)
        assert refusal(lambda r=request: server.stub.ListContexts(r))[1] == "PAGE_TOKEN_INVALID"
    request = pb.ListContextsRequest(page_size=-1)
    assert refusal(lambda: server.stub.ListContexts(request))[1] == "ARGUMENT_INVALID"


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


def test_a_context_in_use_is_not_deleted_and_its_answer_goes_on(server):
    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name, max_tokens=4)
    until(lambda: server.engine.asks)
    request = pb.DeleteContextRequest(name=context.name)
    status, reason, _ = refusal(lambda: server.stub.DeleteContext(request))
    assert (status, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONTEXT_IN_USE")
    server.engine.gate.set()
    assert text_of(answer) == "who-0 who-1 who-2 who-3 "
    server.stub.DeleteContext(request)


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


# Ask


def test_case_b40_a_cancelled_answer_leaves_its_neighbour_alone(server):
    context = active(server)
    server.engine.gate.clear()
    doomed, other = ask(server, context.name, "doomed"), ask(server, context.name, max_tokens=5)
    until(lambda: len(server.engine.asks) == 2)
    doomed.cancel()
    until(lambda: any(a.is_cancelled for a in server.engine.asks))
    server.engine.gate.set()
    assert text_of(other) == "who-0 who-1 who-2 who-3 who-4 "
    cancelled = next(a for a in server.engine.asks if a.spec.question == "doomed")
    assert cancelled.tokens == 0
    until(lambda: server.app.decode.asks_running == 0)


def test_a_closed_channel_ends_the_answer(server):
    context = active(server)
    with grpc.insecure_channel(server.address) as channel:
        from openbook.v1 import contexts_pb2_grpc as rpcs

        request = pb.AskRequest(context=context.name, question="who", max_tokens=2048)
        answer = iter(rpcs.ContextServiceStub(channel).Ask(request))
        next(answer)
    until(lambda: server.app.decode.asks_running == 0)
    until(lambda: server.engine.asks[0].is_cancelled)


def test_case_b42_asks_at_once_over_a_cold_context_load_it_once(server):
    context = active(server)
    server.engine.open_gate.clear()
    answers = [ask(server, context.name, f"q{i}", max_tokens=2) for i in range(8)]
    until(lambda: server.app.decode.asks_running == 8)
    server.engine.open_gate.set()
    for i, answer in enumerate(answers):
        assert text_of(answer) == f"q{i}-0 q{i}-1 "
    assert server.engine.loads == 1


def test_asks_over_the_limit_are_refused_at_once_and_the_others_answered(make_server):
    server = make_server(sequences_max=1, asks_waiting_max=1)
    context = active(server)
    server.engine.gate.clear()
    answers = [ask(server, context.name, max_tokens=1) for _ in range(2)]
    until(lambda: server.app.decode.asks_running == 2)
    status, reason, _ = refusal(lambda: ask(server, context.name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ASKS_FULL")
    server.engine.gate.set()
    assert [text_of(answer) for answer in answers] == ["who-0 ", "who-0 "]


def test_case_b43_contexts_in_use_over_the_memory_are_refused_and_idle_ones_make_room(make_server):
    server = make_server(opened_bytes_max=1)
    first, second = active(server, b"one"), active(server, b"two")
    for _ in range(5):  # round robin: each makes room for the other
        for context in (first, second):
            assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "
    server.engine.gate.clear()
    answer = ask(server, first.name, max_tokens=1)
    until(lambda: server.app.opened.is_in_use(first.name.removeprefix("contexts/")))
    status, reason, _ = refusal(lambda: ask(server, second.name))
    assert (status, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OPENED_FULL")
    server.engine.gate.set()
    assert text_of(answer) == "who-0 "


def test_a_question_over_the_token_limit_is_refused(make_server):
    server = make_server(question_tokens_max=3)
    context = active(server)
    assert text_of(ask(server, context.name, "a b c", max_tokens=1)) == "a-0 "
    status, reason, details = refusal(lambda: ask(server, context.name, "a b c d"))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "QUESTION_TOO_LONG")
    assert details == {"tokens": "4", "limit": "3"}


def test_a_failing_engine_ends_every_answer_and_health_says_so(server):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    context = active(server)
    server.engine.gate.clear()
    answer = ask(server, context.name)
    until(lambda: server.engine.asks)
    server.engine.crash = MemoryError("about " + DOCUMENT.decode())
    assert refusal(lambda: answer)[:2] == (grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED")
    assert refusal(lambda: ask(server, context.name))[1] == "ENGINE_STOPPED"
    health = health_pb2_grpc.HealthStub(server.channel)
    request = health_pb2.HealthCheckRequest(service="openbook.v1.ContextService")
    until(lambda: health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.mark.parametrize("question", ["explode now", "fail now"])
def test_an_unexpected_error_is_internal_with_a_fixed_text(server, question):
    context = active(server)
    with pytest.raises(grpc.RpcError) as raised:
        list(ask(server, context.name, question))
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "now" not in raised.value.details()
    assert text_of(ask(server, context.name, max_tokens=1)) == "who-0 "


# What is not served yet


def test_every_field_of_an_ask_is_served_or_refused_by_name(server):
    context = active(server)
    fields = {field.name for field in pb.AskRequest.DESCRIPTOR.fields}
    assert fields == SERVED | NOT_SERVED and not SERVED & NOT_SERVED
    values = {"group_union": True, "evidence": True, "session": "s",
              "question_budget": pb.Budget(exact=pb.Budget.Exact())}  # fmt: skip
    assert set(values) == NOT_SERVED
    for name, value in values.items():
        status, reason, details = refusal(
            lambda n=name, v=value: ask(server, context.name, **{n: v})
        )
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_SUPPORTED_YET")
        assert details == {"field": name}
    mass = pb.Budget(mass=pb.Budget.Mass(share=0.9))
    assert refusal(lambda: ask(server, context.name, budget=mass))[2] == {"field": "budget.mass"}


def test_a_field_of_a_newer_client_is_refused_not_ignored(server):
    newer = b"\x9a\x06\x01x"  # field 99, a string
    request = pb.GetContextRequest.FromString(
        pb.GetContextRequest(name=UNKNOWN).SerializeToString() + newer
    )
    assert refusal(lambda: server.stub.GetContext(request))[1:] == (
        "NOT_SUPPORTED_YET", {"field": "field 99"},
    )  # fmt: skip


@pytest.mark.parametrize("method", ["UpdateContext", "VerifyContext", "CountTokens"])
def test_a_method_not_served_is_refused_by_name(server, method):
    request = getattr(pb, f"{method}Request")()
    assert refusal(lambda: getattr(server.stub, method)(request)) == (
        grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED_YET", {"method": method},
    )  # fmt: skip


def test_the_model_is_listed_with_its_shape_and_layouts(server):
    (model,) = server.stub.ListModels(pb.ListModelsRequest()).models
    assert model.name == "fake/model" and model.layers == 2 and model.positions_max == 4096
    assert set(model.prompt_layouts) == {pb.PROMPT_LAYOUT_CHAT, pb.PROMPT_LAYOUT_COMPLETION}
