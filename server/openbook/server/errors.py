"""What can go wrong in the server, and the one table from every domain error to the wire.

    ServerError
    ├── RequestRefused                the caller's message is wrong
    │   ├── NameInvalid
    │   ├── ArgumentInvalid           names the field, never its value
    │   ├── FieldNotSupported
    │   ├── PageTokenInvalid
    │   ├── DocumentOversized, ChunkOversized
    │   └── DigestMismatch
    ├── Unauthenticated
    ├── ModelUnknown, ContextUnknown
    ├── ContextNotReady, ContextFailed, ContextInUse
    ├── IngestQueueFull, AsksFull, CallsFull, CallerLimitReached, OpenedFull
    ├── ReaderStalled
    ├── StoreQuotaReached, StorageFull
    ├── UploadCorrupt                 a stored document is not what was uploaded
    ├── IngestCancelled, IngestCrashed
    ├── EngineStopped, Draining, DeadlinePassed
    └── BrokerAway                    Redis did not answer; never reaches a caller

Owns status, reason and text of every error. A text holds names, sizes and positions, nothing that
a user wrote. What is not in the table is a fault of ours: the caller gets a fixed text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from openbook import worker
from openbook.indexstore import errors as store

DOMAIN = "openbook"
FAULT_REASON = "INTERNAL"
FAULT_TEXT = "the server failed; the time of the call finds it in the server's log"

Code = grpc.StatusCode


class ServerError(Exception):
    """Anything the server itself refuses or cannot do."""


class RequestRefused(ServerError):
    """The caller's message is wrong."""


class NameInvalid(RequestRefused):
    """A resource name is not `contexts/` and a context id."""

    def __init__(self) -> None:
        super().__init__("a context's name is contexts/ and 32 hexadecimal digits")


class ArgumentInvalid(RequestRefused):
    """A field holds a value that is never right."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")
        self.field = field


class FieldNotSupported(RequestRefused):
    """A field of the interface that this server does not serve yet."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported yet")
        self.field = field


class PageTokenInvalid(RequestRefused):
    """A page token is none of ours."""

    def __init__(self) -> None:
        super().__init__("page_token is not one that this server gave")


class DocumentOversized(RequestRefused):
    """A document has more bytes than the server takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"a document may have at most {limit} bytes")
        self.limit = limit


class ChunkOversized(RequestRefused):
    """One chunk of an upload has more bytes than one message may carry."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a chunk may have at most {limit} bytes, got {size}")
        self.bytes = size
        self.limit = limit


class DigestMismatch(RequestRefused):
    """The bytes that arrived are not those that were announced."""

    def __init__(self) -> None:
        super().__init__("the document's SHA-256 is not the one in the metadata")


class Unauthenticated(ServerError):
    """The caller has not shown the token; says nothing else."""

    def __init__(self) -> None:
        super().__init__("this server wants a bearer token, and none or another was given")


class ModelUnknown(ServerError):
    """The named model is not the one served."""

    def __init__(self) -> None:
        super().__init__("this server does not serve that model")


class ContextUnknown(ServerError):
    """No such context, or not the caller's: both read the same."""

    def __init__(self) -> None:
        super().__init__("there is no such context")


class ContextNotReady(ServerError):
    """The context is still being read."""

    def __init__(self) -> None:
        super().__init__("the context is still being read; the same ingest again waits for it")


class ContextFailed(ServerError):
    """The context is in state FAILED; carries the reason and text it failed with."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ContextInUse(ServerError):
    """The context cannot be deleted while an answer reads it."""

    def __init__(self) -> None:
        super().__init__("the context is in use by a running ask")


class IngestQueueFull(ServerError):
    """Too many documents wait to be read, or arrive now."""

    def __init__(self, limit: int, *, what: str = "wait to be read") -> None:
        super().__init__(f"{limit} documents already {what}; try again later")
        self.limit = limit


class AsksFull(ServerError):
    """Too many asks run or wait."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} asks already run or wait; try again later")
        self.limit = limit


class CallsFull(ServerError):
    """Too many calls of one kind run or wait."""

    def __init__(self, limit: int, what: str) -> None:
        super().__init__(f"{limit} {what} already wait; try again later")
        self.limit = limit


class CallerLimitReached(ServerError):
    """One caller has as many calls or documents under way as one may have."""

    def __init__(self, limit: int, *, what: str = "calls under way") -> None:
        super().__init__(f"this caller already has {limit} {what}; try again later")
        self.limit = limit


class OpenedFull(ServerError):
    """The contexts being read fill the memory set aside for them."""

    def __init__(self, limit: int, *, what: str = "bytes set aside for open ones") -> None:
        super().__init__(f"contexts in use fill the {limit} {what}")
        self.limit = limit


class StoreQuotaReached(ServerError):
    """The contexts fill the bytes set aside for them, and none of them may go."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the stored contexts fill the {limit} bytes set aside for them")
        self.limit = limit


class StorageFull(ServerError):
    """The disk has no room for an upload."""

    def __init__(self) -> None:
        super().__init__("the server's disk is full")


class ReaderStalled(ServerError):
    """The caller does not read its answer."""

    def __init__(self) -> None:
        super().__init__("the answer was not read in time")


class UploadCorrupt(ServerError):
    """A stored upload is not what was uploaded."""

    def __init__(self) -> None:
        super().__init__("the stored upload is damaged; upload the document again")


class IngestCancelled(ServerError):
    """The reading stopped because the context was deleted or the server stops."""

    def __init__(self) -> None:
        super().__init__("the reading was cancelled")


class IngestCrashed(ServerError):
    """The server stopped each time it read this document."""

    def __init__(self, attempts: int) -> None:
        super().__init__(f"the server stopped {attempts} times while reading this document")
        self.attempts = attempts


class EngineStopped(ServerError):
    """The thread that answers has ended."""

    def __init__(self) -> None:
        super().__init__("the server cannot answer; it has to be started again")


class Draining(ServerError):
    """The server is about to stop and takes nothing new."""

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class DeadlinePassed(ServerError):
    """The call took longer than the server allows."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the call took longer than the {limit_s:g} s that this server allows")
        self.limit_s = limit_s


class BrokerAway(ServerError):
    """Redis did not answer in time; no caller waits for it."""

    def __init__(self) -> None:
        super().__init__("Redis does not answer")


@dataclass(frozen=True, slots=True)
class Row:
    """How one class of errors goes over the wire.

    `fields` are attributes that go with it. `text` stands in for the error's own, which in the
    store's case may name a path of this machine.
    """

    code: Code
    reason: str
    fields: tuple[str, ...] = ()
    text: str | None = None


DAMAGED = "the stored context is damaged; ingest the document again"
MISSING = "the context is no longer on disk; ingest the document again"
DISK = "the server's disk does not do what it should"

TABLE: Mapping[type[Exception], Row] = {
    NameInvalid: Row(Code.INVALID_ARGUMENT, "NAME_INVALID"),
    ArgumentInvalid: Row(Code.INVALID_ARGUMENT, "ARGUMENT_INVALID", ("field",)),
    FieldNotSupported: Row(Code.INVALID_ARGUMENT, "NOT_SUPPORTED_YET", ("field",)),
    PageTokenInvalid: Row(Code.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID"),
    DocumentOversized: Row(Code.INVALID_ARGUMENT, "DOCUMENT_OVERSIZED", ("limit",)),
    ChunkOversized: Row(Code.INVALID_ARGUMENT, "CHUNK_OVERSIZED", ("bytes", "limit")),
    DigestMismatch: Row(Code.INVALID_ARGUMENT, "DIGEST_MISMATCH"),
    Unauthenticated: Row(Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    ModelUnknown: Row(Code.NOT_FOUND, "MODEL_UNKNOWN"),
    ContextUnknown: Row(Code.NOT_FOUND, "CONTEXT_UNKNOWN"),
    ContextNotReady: Row(Code.FAILED_PRECONDITION, "CONTEXT_NOT_READY"),
    ContextFailed: Row(Code.FAILED_PRECONDITION, "CONTEXT_FAILED"),
    ContextInUse: Row(Code.FAILED_PRECONDITION, "CONTEXT_IN_USE"),
    IngestQueueFull: Row(Code.RESOURCE_EXHAUSTED, "INGEST_QUEUE_FULL", ("limit",)),
    AsksFull: Row(Code.RESOURCE_EXHAUSTED, "ASKS_FULL", ("limit",)),
    CallsFull: Row(Code.RESOURCE_EXHAUSTED, "CALLS_FULL", ("limit",)),
    CallerLimitReached: Row(Code.RESOURCE_EXHAUSTED, "CALLER_LIMIT_REACHED", ("limit",)),
    OpenedFull: Row(Code.RESOURCE_EXHAUSTED, "OPENED_FULL", ("limit",)),
    StoreQuotaReached: Row(Code.RESOURCE_EXHAUSTED, "STORE_QUOTA_REACHED", ("limit",)),
    StorageFull: Row(Code.RESOURCE_EXHAUSTED, "STORE_FULL"),
    ReaderStalled: Row(Code.RESOURCE_EXHAUSTED, "READER_STALLED"),
    UploadCorrupt: Row(Code.DATA_LOSS, "UPLOAD_CORRUPT"),
    IngestCancelled: Row(Code.ABORTED, "INGEST_CANCELLED"),
    IngestCrashed: Row(Code.INTERNAL, "INGEST_CRASHED", ("attempts",)),
    EngineStopped: Row(Code.UNAVAILABLE, "ENGINE_STOPPED"),
    Draining: Row(Code.UNAVAILABLE, "DRAINING"),
    DeadlinePassed: Row(Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED", ("limit_s",)),
    BrokerAway: Row(Code.UNAVAILABLE, "BROKER_AWAY"),
    store.ContextMissing: Row(Code.DATA_LOSS, "CONTEXT_MISSING", text=MISSING),
    store.ContextIncomplete: Row(Code.DATA_LOSS, "CONTEXT_INCOMPLETE", text=DAMAGED),
    store.ContextInUse: Row(Code.FAILED_PRECONDITION, "CONTEXT_IN_USE", text=str(ContextInUse())),
    store.AlreadyPublished: Row(Code.DATA_LOSS, "CONTEXT_CORRUPT", text=DAMAGED),
    store.FormatUnsupported: Row(
        Code.FAILED_PRECONDITION, "FORMAT_UNSUPPORTED", ("found", "oldest", "newest")
    ),
    store.FingerprintMismatch: Row(
        Code.FAILED_PRECONDITION,
        "FINGERPRINT_MISMATCH",
        ("field", "expected", "found"),
        "the context was stored under another model than the one served",
    ),
    store.ShardCorrupt: Row(Code.DATA_LOSS, "CONTEXT_CORRUPT", ("file",), DAMAGED),
    store.ShardTruncated: Row(
        Code.DATA_LOSS, "CONTEXT_TRUNCATED", ("file", "expected", "found"), DAMAGED
    ),
    store.StoreReadFailed: Row(Code.UNAVAILABLE, "STORE_READ_FAILED", ("file",), DISK),
    store.StoreWriteFailed: Row(Code.UNAVAILABLE, "STORE_WRITE_FAILED", text=DISK),
    store.StoreFull: Row(Code.RESOURCE_EXHAUSTED, "STORE_FULL", text=str(StorageFull())),
    worker.ModelMissing: Row(Code.FAILED_PRECONDITION, "MODEL_MISSING"),
    worker.UnsupportedModel: Row(Code.FAILED_PRECONDITION, "MODEL_UNSUPPORTED", ("reason",)),
    worker.EngineClosed: Row(Code.UNAVAILABLE, "ENGINE_STOPPED", text=str(EngineStopped())),
    worker.LayoutUnavailable: Row(Code.INVALID_ARGUMENT, "LAYOUT_UNAVAILABLE"),
    worker.DocumentEmpty: Row(Code.INVALID_ARGUMENT, "DOCUMENT_EMPTY"),
    worker.MemoryShort: Row(
        Code.RESOURCE_EXHAUSTED,
        "MEMORY_SHORT",
        ("tokens", "limit", "needed_bytes", "left_bytes"),
    ),
    worker.DocumentTooLong: Row(Code.INVALID_ARGUMENT, "DOCUMENT_TOO_LONG", ("tokens", "limit")),
    worker.NotText: Row(Code.INVALID_ARGUMENT, "DOCUMENT_NOT_TEXT", ("offset",)),
    worker.NonFiniteKeys: Row(Code.INTERNAL, "NON_FINITE_KEYS", ("layer", "head", "position")),
    worker.NonFiniteLogits: Row(Code.INTERNAL, "NON_FINITE_LOGITS", ("step",)),
    worker.IngestCancelled: Row(Code.ABORTED, "INGEST_CANCELLED"),
    worker.QuestionTooLong: Row(Code.INVALID_ARGUMENT, "QUESTION_TOO_LONG", ("tokens", "limit")),
    worker.BadAsk: Row(Code.INVALID_ARGUMENT, "ARGUMENT_INVALID", ("field",)),
}

CODES: Mapping[str, Code] = {row.reason: row.code for row in TABLE.values()} | {
    FAULT_REASON: Code.INTERNAL
}


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as a caller sees it."""

    code: Code
    reason: str
    text: str
    details: Mapping[str, str]

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the trailing metadata that carries google.rpc.Status with one ErrorInfo."""
        info = error_details_pb2.ErrorInfo(
            reason=self.reason, domain=DOMAIN, metadata=dict(self.details)
        )
        packed = any_pb2.Any()
        packed.Pack(info)
        number: int = self.code.value[0]
        status = status_pb2.Status(code=number, message=self.text, details=[packed])
        return (("grpc-status-details-bin", status.SerializeToString()),)


def row_of(kind: type[BaseException]) -> Row | None:
    """Return the row of a class: its own, else that of the nearest class above it."""
    return next((TABLE[base] for base in kind.__mro__ if base in TABLE), None)


def is_fault(error: BaseException) -> bool:
    """Tell whether `error` is a fault of ours: not one the table knows."""
    return row_of(type(error)) is None


def describe(error: BaseException) -> WireError:
    """Return what a caller may see of `error`; of a fault of ours, nothing of its text."""
    row = row_of(type(error))
    if row is None:
        return WireError(Code.INTERNAL, FAULT_REASON, FAULT_TEXT, {})
    if isinstance(error, ContextFailed):
        return WireError(CODES.get(error.reason, row.code), error.reason, str(error), {})
    details = {name: str(getattr(error, name)) for name in row.fields}
    return WireError(row.code, row.reason, row.text or str(error), details)
