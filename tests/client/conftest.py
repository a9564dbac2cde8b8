"""A fake of the service, on a real gRPC server on loopback, for every test of the client."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from openbook.client import Client
from openbook.v1 import contexts_pb2 as pb
from openbook.v1 import contexts_pb2_grpc

from .looped import LoopedClient

LAYERS = 3
FINAL = pb.AskFinal(
    usage=pb.Usage(context_tokens=7000, question_tokens=9, answer_tokens=4),
    finish_reason=pb.FINISH_REASON_STOP,
    receipt=pb.Receipt(tokens_reused=7000, tokens_prefilled=9, keys_scored=0.25, budget="keys=100"),
)


@dataclass(frozen=True)
class Refusal:
    """An error that the fake answers with instead of doing the call."""

    code: grpc.StatusCode
    reason: str
    message: str = "refused"
    metadata: dict[str, str] = field(default_factory=dict)
    domain: str = "openbook"


class FakeContextService(contexts_pb2_grpc.ContextServiceServicer):
    """Keeps documents in memory; answers with `deltas`; fails as told in `refusals`."""

    def __init__(self) -> None:
        self.contexts: dict[str, pb.Context] = {}
        self.documents: list[bytes] = []
        self.chunk_sizes: list[list[int]] = []
        self.metadata: list[pb.IngestContextRequest.Metadata] = []
        self.asked: list[pb.AskRequest] = []
        self.updates: list[pb.UpdateContextRequest] = []
        self.counted: list[pb.CountTokensRequest] = []
        self.deltas = ["The ", "keeper's ", "", "daughter."]
        self.answers: dict[str, list[str]] = {}  # of questions that have their own
        self.tokens_forwarded = 7000
        self.tokens_of_an_ask = FINAL.usage.question_tokens
        self.final: pb.AskFinal | None = FINAL
        self.refusals: dict[str, list[Refusal]] = {}
        self.refusals_mid_answer: list[Refusal] = []
        self.refusals_mid_watch: list[Refusal] = []
        self.refusals_after_upload: list[Refusal] = []
        self.calls: list[str] = []
        self.headers: list[dict[str, str | bytes]] = []
        self.page_size = 2
        self.failed_ingest: pb.ContextError | None = None
        self.is_known_answered_early = False
        self.is_upload_held = False
        self.upload_begun = threading.Event()
        self.upload_ended = threading.Event()
        self.is_watch_cut = False
        self.is_watch_held = False
        self.watch_ended = threading.Event()
        self.hold_answer_after: int | None = None
        self.answer_ended = threading.Event()

    def refuse(self, method: str, *refusals: Refusal) -> None:
        """Answer the next calls of `method` with `refusals`, one each."""
        self.refusals[method] = list(refusals)

    def _enter(self, method: str, rpc: grpc.ServicerContext) -> None:
        self.calls.append(method)
        self.headers.append(dict(rpc.invocation_metadata()))
        if self.refusals.get(method):
            abort(rpc, self.refusals[method].pop(0))

    def _context(self, name: str, rpc: grpc.ServicerContext) -> pb.Context:
        if name not in self.contexts:
            abort(rpc, Refusal(grpc.StatusCode.NOT_FOUND, "CONTEXT_UNKNOWN", "no such context"))
        return self.contexts[name]

    def IngestContext(self, request_iterator, rpc):  # noqa: N802
        self._enter("IngestContext", rpc)
        if self.is_upload_held:
            rpc.add_callback(self.upload_ended.set)
            self.upload_begun.set()
            self.upload_ended.wait(timeout=30)  # until the caller goes away
        metadata = next(request_iterator).metadata
        known = self.contexts.get(f"contexts/{metadata.sha256.hex()[:32]}")
        if self.is_known_answered_early and known is not None:
            return pb.IngestContextResponse(context=known)
        chunks = [message.chunk for message in request_iterator]
        document = b"".join(chunks)
        self.metadata.append(metadata)
        self.documents.append(document)
        self.chunk_sizes.append([len(chunk) for chunk in chunks])
        if self.refusals_after_upload:
            abort(rpc, self.refusals_after_upload.pop(0))
        if hashlib.sha256(document).digest() != metadata.sha256:
            abort(rpc, Refusal(grpc.StatusCode.INVALID_ARGUMENT, "DIGEST_MISMATCH"))
        name = f"contexts/{metadata.sha256.hex()[:32]}"
        if name not in self.contexts:
            self.contexts[name] = pb.Context(
                name=name,
                display_name=metadata.display_name,
                model="fake",
                state=pb.CONTEXT_STATE_CREATING,
                prompt_layout=metadata.prompt_layout or pb.PROMPT_LAYOUT_CHAT,
                progress=pb.Progress(stage=pb.INGEST_STAGE_QUEUED, layers=LAYERS),
            )
            self.contexts[name].create_time.FromSeconds(1_700_000_000)
        return pb.IngestContextResponse(context=self.contexts[name])

    def WatchContext(self, request, rpc):  # noqa: N802
        rpc.add_callback(self.watch_ended.set)
        self._enter("WatchContext", rpc)
        context = self._context(request.name, rpc)
        if self.is_watch_held:
            yield pb.WatchContextResponse(context=context)
            self.watch_ended.wait(timeout=30)  # until the caller goes away
            return
        for done in range(LAYERS + 1):
            context.progress.stage = pb.INGEST_STAGE_READING
            context.progress.layers_done = done
            yield pb.WatchContextResponse(context=context)
        if self.refusals_mid_watch:
            abort(rpc, self.refusals_mid_watch.pop(0))
        if self.is_watch_cut:
            return
        if self.failed_ingest is not None:
            context.state = pb.CONTEXT_STATE_FAILED
            context.error.CopyFrom(self.failed_ingest)
            context.ClearField("progress")  # as the service does: what failed is at no stage
        else:
            context.state = pb.CONTEXT_STATE_ACTIVE
            context.token_count = 7000
            context.bytes = 200_000_000
            context.kv_bytes_16bit = 161_280_000
            context.timing.prefill_s = 40.0
            context.progress.stage = pb.INGEST_STAGE_DONE
        yield pb.WatchContextResponse(context=context)

    def GetContext(self, request, rpc):  # noqa: N802
        self._enter("GetContext", rpc)
        return pb.GetContextResponse(context=self._context(request.name, rpc))

    def ListContexts(self, request, rpc):  # noqa: N802
        self._enter("ListContexts", rpc)
        start = int(request.page_token or 0)
        end = start + self.page_size
        every = list(self.contexts.values())
        token = str(end) if end < len(every) else ""
        return pb.ListContextsResponse(contexts=every[start:end], next_page_token=token)

    def UpdateContext(self, request, rpc):  # noqa: N802
        self._enter("UpdateContext", rpc)
        context = self._context(request.name, rpc)
        self.updates.append(request)
        context.ClearField("expiration")
        if request.HasField("ttl"):
            context.expire_time.FromSeconds(1_700_000_000 + request.ttl.seconds)
        return pb.UpdateContextResponse(context=context)

    def VerifyContext(self, request, rpc):  # noqa: N802
        self._enter("VerifyContext", rpc)
        self._context(request.name, rpc)
        return pb.VerifyContextResponse(
            records_checked=90, bytes_checked=200_000_000, probes_checked=12, largest_error=0.001
        )

    def ReindexContext(self, request, rpc):  # noqa: N802
        self._enter("ReindexContext", rpc)
        return pb.ReindexContextResponse(context=self._context(request.name, rpc))

    def CountTokens(self, request, rpc):  # noqa: N802
        self._enter("CountTokens", rpc)
        self.counted.append(request)
        count = len(request.document.split())
        return pb.CountTokensResponse(token_count=count, bytes=count * LAYERS * 3 * 64 * 4)

    def DeleteContext(self, request, rpc):  # noqa: N802
        self._enter("DeleteContext", rpc)
        self._context(request.name, rpc)
        del self.contexts[request.name]
        return pb.DeleteContextResponse()

    def Ask(self, request, rpc):  # noqa: N802
        rpc.add_callback(self.answer_ended.set)
        self._enter("Ask", rpc)
        self.asked.append(request)
        self._context(request.context, rpc)
        self.tokens_forwarded += self.tokens_of_an_ask
        for number, delta in enumerate(self.answers.get(request.question, self.deltas)):
            if number == self.hold_answer_after:
                self.answer_ended.wait(timeout=30)  # until the caller cancels
                return
            yield pb.AskResponse(delta=delta)
        if self.refusals_mid_answer:
            abort(rpc, self.refusals_mid_answer.pop(0))
        if self.final is not None:
            yield pb.AskResponse(final=self.final)

    def ListModels(self, request, rpc):  # noqa: N802
        self._enter("ListModels", rpc)
        model = pb.Model(
            name="fake",
            fingerprint="f" * 64,
            layers=LAYERS,
            query_heads=9,
            kv_heads=3,
            head_dim=64,
            positions_max=8192,
            prompt_layouts=[pb.PROMPT_LAYOUT_CHAT, pb.PROMPT_LAYOUT_COMPLETION, 77],
            tokens_forwarded=self.tokens_forwarded,
        )
        return pb.ListModelsResponse(models=[model])


def abort(rpc: grpc.ServicerContext, refusal: Refusal) -> None:
    """End the call as the service does: google.rpc.Status with one ErrorInfo."""
    info = error_details_pb2.ErrorInfo(
        reason=refusal.reason, domain=refusal.domain, metadata=refusal.metadata
    )
    detail = AnyMessage()
    detail.Pack(info)
    status = status_pb2.Status(
        code=refusal.code.value[0], message=refusal.message, details=[detail]
    )
    rpc.abort_with_status(rpc_status.to_status(status))


class FakeHealth(grpc.GenericRpcHandler):
    """grpc.health.v1 by its bytes, as the client has no library for it."""

    answer = b"\x08\x01"  # SERVING

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != "/grpc.health.v1.Health/Check":
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, rpc: self.answer)


@dataclass(frozen=True)
class FakeServer:
    """A running fake: where it listens and what it serves."""

    address: str
    service: FakeContextService
    health: FakeHealth


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Start fakes on free loopback ports; stopped at the end of the test."""
    servers: list[grpc.Server] = []

    def start(credentials: grpc.ServerCredentials | None = None) -> FakeServer:
        service = FakeContextService()
        server = grpc.server(
            ThreadPoolExecutor(max_workers=4),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 << 20)],
        )
        contexts_pb2_grpc.add_ContextServiceServicer_to_server(service, server)
        health = FakeHealth()
        server.add_generic_rpc_handlers((health,))
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        servers.append(server)
        return FakeServer(f"127.0.0.1:{port}", service, health)

    yield start
    for server in servers:
        server.stop(grace=None).wait(timeout=10)


@pytest.fixture
def fake(serve: Callable[..., FakeServer]) -> FakeServer:
    """Return one running fake."""
    return serve()


@pytest.fixture(params=["thread", "loop"])
def client(request: pytest.FixtureRequest, fake: FakeServer) -> Iterator[Client]:
    """Return a client of the fake: Client, then AsyncClient as seen from outside its loop."""
    if request.param == "thread":
        with Client(fake.address) as client:
            yield client
        return
    with LoopedClient(fake.address) as looped:
        yield looped  # type: ignore[misc]


@pytest.fixture
def context_id(client: Client) -> str:
    """Return the id of a context that the fake has read."""
    return client.ingest("The keeper's daughter keeps the light.\n")
