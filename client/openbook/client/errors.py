"""The errors of the client, and the one table from the service's reasons to them.

    OpenbookError
    ├── InvalidRequest        the request itself is wrong; sending it again cannot help
    │   ├── DocumentEmpty
    │   ├── DocumentNotText
    │   ├── DocumentTooLong
    │   ├── QuestionTooLong
    │   └── NotSupportedYet   a field or call that this server does not serve
    ├── NotFound
    ├── NotReady              the context or server is not in the state that the call needs
    │   ├── ContextInUse      being deleted or replaced; try again later
    │   ├── FormatUnsupported stored by another version of openbook
    │   ├── ModelMismatch     stored under another model than the one that is served
    │   └── ModelUnsupported
    ├── ContextCorrupt        the stored bytes are damaged or gone; ingest again
    ├── IngestFailed          the server gave the document up
    ├── Exhausted             a limit of the server: slow down, or free some room
    │   └── StoreFull
    ├── Unavailable           nobody answers at that address
    ├── DeadlineExceeded
    ├── Cancelled
    ├── NotAllowed            no credential, or one without this right
    └── ServerFault           the server failed, or its answer makes no sense

A mistake that the client sees before any call is a ValueError or TypeError, never one of these.

Knows: google.rpc.Status and ErrorInfo. Does not know: which call failed, or what was in it: no
message holds a document's or a question's text.
"""

from collections.abc import Mapping

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

DOMAIN = "openbook"


class OpenbookError(Exception):
    """The root of everything that a call to the service can raise.

    `reason` is the service's own word for what went wrong ("" when it gave none), `status` the
    name of the gRPC status, `details` the figures that belong to it (such as tokens and limit).
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        status: str = "UNKNOWN",
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.status = status
        self.details = dict(details or {})


class InvalidRequest(OpenbookError):
    """The request itself is wrong; sending it again cannot help."""


class DocumentEmpty(InvalidRequest):
    """The document has no text."""


class DocumentNotText(InvalidRequest):
    """The document is not UTF-8, or its bytes are not those that were announced."""


class DocumentTooLong(InvalidRequest):
    """The document has more bytes or tokens than the model or the server takes."""


class QuestionTooLong(InvalidRequest):
    """The question and its answer do not fit behind the context."""


class NotSupportedYet(InvalidRequest):
    """A field or call that this server does not serve."""


class NotFound(OpenbookError):
    """There is no such context or model, or it belongs to somebody else."""


class NotReady(OpenbookError):
    """The context or the server is not in the state that the call needs."""


class ContextInUse(NotReady):
    """The context is being deleted or replaced, or another process of its server has it open."""


class FormatUnsupported(NotReady):
    """The context was stored in a format that this server does not read."""


class ModelMismatch(NotReady):
    """The context was stored under another model than the one that is served."""


class ModelUnsupported(NotReady):
    """The server cannot serve this model."""


class ContextCorrupt(OpenbookError):
    """The stored bytes are damaged or gone; delete the context and ingest the document again."""


class IngestFailed(OpenbookError):
    """The server accepted the document and later gave it up."""


class Exhausted(OpenbookError):
    """A limit of the server is reached."""


class StoreFull(Exhausted):
    """The disk, or the bytes set aside for contexts, have no room for the context."""


class Unavailable(OpenbookError):
    """Nobody answers at that address, or the server is going away."""


class DeadlineExceeded(OpenbookError):
    """The call took longer than its timeout or the server's own limit."""


class Cancelled(OpenbookError):
    """The call was cancelled, here or by the server."""


class NotAllowed(OpenbookError):
    """No credential was given, or it does not grant this."""


class ServerFault(OpenbookError):
    """The server failed, or its answer makes no sense."""


REASONS: Mapping[str, type[OpenbookError]] = {
    # the request
    "NAME_INVALID": InvalidRequest,
    "ARGUMENT_INVALID": InvalidRequest,
    "PAGE_TOKEN_INVALID": InvalidRequest,
    "CHUNK_OVERSIZED": InvalidRequest,
    "LAYOUT_UNAVAILABLE": InvalidRequest,
    "NOT_SUPPORTED_YET": NotSupportedYet,
    "DOCUMENT_EMPTY": DocumentEmpty,
    "DOCUMENT_NOT_TEXT": DocumentNotText,
    "DIGEST_MISMATCH": DocumentNotText,
    "DOCUMENT_OVERSIZED": DocumentTooLong,
    "DOCUMENT_TOO_LONG": DocumentTooLong,
    "QUESTION_TOO_LONG": QuestionTooLong,
    # who asks
    "UNAUTHENTICATED": NotAllowed,
    # what it names
    "CONTEXT_UNKNOWN": NotFound,
    "MODEL_UNKNOWN": NotFound,
    "CONTEXT_NOT_READY": NotReady,
    "CONTEXT_IN_USE": ContextInUse,
    "MODEL_MISSING": ModelUnsupported,
    "MODEL_UNSUPPORTED": ModelUnsupported,
    # what is stored
    "FORMAT_UNSUPPORTED": FormatUnsupported,
    "FINGERPRINT_MISMATCH": ModelMismatch,
    "CONTEXT_CORRUPT": ContextCorrupt,
    "CONTEXT_TRUNCATED": ContextCorrupt,
    "CONTEXT_INCOMPLETE": ContextCorrupt,
    "CONTEXT_MISSING": ContextCorrupt,
    # reading a document
    "CONTEXT_FAILED": IngestFailed,
    "UPLOAD_CORRUPT": IngestFailed,
    "INGEST_CANCELLED": IngestFailed,
    "INGEST_CRASHED": IngestFailed,
    "NON_FINITE_KEYS": IngestFailed,
    # the server's limits and health
    "INGEST_QUEUE_FULL": Exhausted,
    "ASKS_FULL": Exhausted,
    "CALLS_FULL": Exhausted,
    "CALLER_LIMIT_REACHED": Exhausted,
    "OPENED_FULL": Exhausted,
    "READER_STALLED": Exhausted,
    "MEMORY_SHORT": Exhausted,
    "STORE_FULL": StoreFull,
    "STORE_QUOTA_REACHED": StoreFull,
    "STORE_READ_FAILED": Unavailable,
    "STORE_WRITE_FAILED": Unavailable,
    "ENGINE_STOPPED": Unavailable,
    "DRAINING": Unavailable,
    "BROKER_AWAY": Unavailable,
    "DEADLINE_PASSED": DeadlineExceeded,
    "NON_FINITE_LOGITS": ServerFault,
    "INTERNAL": ServerFault,
}

STATUSES: Mapping[grpc.StatusCode, type[OpenbookError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: NotReady,
    grpc.StatusCode.FAILED_PRECONDITION: NotReady,
    grpc.StatusCode.ABORTED: NotReady,
    grpc.StatusCode.DATA_LOSS: ContextCorrupt,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedYet,
    grpc.StatusCode.INTERNAL: ServerFault,
    grpc.StatusCode.UNKNOWN: ServerFault,
}

# Said where the service said nothing itself: what gRPC's library has to tell is for its developers,
# and stays in the error's cause.
WORDS: Mapping[type[OpenbookError], str] = {
    InvalidRequest: "the request was refused",
    NotFound: "there is no such context or model",
    NotReady: "the context or the server is not in the state that this needs",
    ContextCorrupt: "the stored bytes are damaged or gone",
    Exhausted: "a limit of the server or of the connection is reached",
    Unavailable: "no server answers at that address",
    DeadlineExceeded: "the call did not end within its timeout",
    Cancelled: "the call was cancelled",
    NotAllowed: "no credential was given, or it does not grant this",
    NotSupportedYet: "the server does not serve this call",
    ServerFault: "the server failed, or it is no openbook server",
}


def from_reason(reason: str, message: str) -> OpenbookError:
    """Return the error of a context that FAILED: its reason's class, else IngestFailed."""
    kind = REASONS.get(reason, IngestFailed)
    return kind(message or "the server gave the document up", reason=reason, status="FAILED")


def from_rpc(error: grpc.RpcError) -> OpenbookError:
    """Translate a failed call: by ErrorInfo's reason, else by its gRPC status.

    The text is the service's own, or one of WORDS. Raise it from `error`, which has gRPC's.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ServerFault(f"the call failed without a status ({type(error).__name__})")
    code = error.code()
    info = _error_info(error)
    kind = STATUSES.get(code, ServerFault)
    if info is None:
        return kind(WORDS[kind], status=code.name)
    return REASONS.get(info.reason, kind)(
        error.details() or WORDS[kind],
        reason=info.reason,
        status=code.name,
        details=info.metadata,
    )


def _error_info(call: grpc.Call | grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """Return our ErrorInfo of a failed call, or None when it carries none that is readable."""
    try:
        status = rpc_status.from_call(call)  # type: ignore[arg-type]  # reads what both have
    except ValueError:  # the rich status contradicts the plain one: trust the plain one
        return None
    if status is None:
        return None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None
