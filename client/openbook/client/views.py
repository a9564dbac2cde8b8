"""What the client shows of the service's messages: frozen values, without protobuf in sight.

Knows: the messages of openbook.v1. Does not know: channels, calls or files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from openbook.v1 import contexts_pb2 as pb

Layout = Literal["chat", "completion"]
State = Literal["creating", "active", "failed", "unknown"]
Stage = Literal["queued", "reading", "sealing", "done", "failed", "unknown"]
FinishReason = Literal["stop", "length", "unknown"]

LAYOUTS: Mapping[Layout, pb.PromptLayout] = {
    "chat": pb.PROMPT_LAYOUT_CHAT,
    "completion": pb.PROMPT_LAYOUT_COMPLETION,
}
_LAYOUT_NAMES: Mapping[int, Layout] = {number: name for name, number in LAYOUTS.items()}
_STATES: Mapping[int, State] = {
    pb.CONTEXT_STATE_CREATING: "creating",
    pb.CONTEXT_STATE_ACTIVE: "active",
    pb.CONTEXT_STATE_FAILED: "failed",
}
_STAGES: Mapping[int, Stage] = {
    pb.INGEST_STAGE_QUEUED: "queued",
    pb.INGEST_STAGE_READING: "reading",
    pb.INGEST_STAGE_SEALING: "sealing",
    pb.INGEST_STAGE_DONE: "done",
}
_FINISH_REASONS: Mapping[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far the reading of a document has come; `layers` is 0 until it is known.

    As text it is short: "reading 12/30 layers".
    """

    stage: Stage
    layers_done: int
    layers: int

    @classmethod
    def from_message(cls, message: pb.Context) -> "IngestProgress":
        """Read the service's message; the progress of a context that FAILED names no stage."""
        progress = message.progress
        stage = _STAGES.get(progress.stage, "unknown")
        if message.state == pb.CONTEXT_STATE_FAILED:
            stage = "failed"
        return cls(stage, progress.layers_done, progress.layers)

    def __str__(self) -> str:
        """Return the stage, and the layers where they say something."""
        if not self.layers or self.stage == "failed":
            return self.stage
        return f"{self.stage} {self.layers_done}/{self.layers} layers"


@dataclass(frozen=True, slots=True)
class IngestTiming:
    """Seconds of each stage of an ingest, as the context's manifest keeps them.

    Zeros until the context is active.
    """

    tokenize_s: float
    prefill_s: float
    build_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A document that the service has read, is reading, or could not read.

    `bytes_on_disk` counts keys, values and index; `kv_bytes_16bit` what the keys and values alone
    take at two bytes a number. `layout` is None when the server does not say, `expires` when the
    context is kept for ever. `error_reason` and `error_message` are empty unless `state` is
    "failed".
    """

    id: str
    display_name: str
    model: str
    state: State
    progress: IngestProgress
    layout: Layout | None
    token_count: int
    bytes_on_disk: int
    kv_bytes_16bit: int
    created: datetime | None
    expires: datetime | None
    timing: IngestTiming
    error_reason: str
    error_message: str

    @classmethod
    def from_message(cls, message: pb.Context) -> "ContextInfo":
        """Read the service's message."""
        timing = message.timing
        return cls(
            id=message.name.removeprefix("contexts/"),
            display_name=message.display_name,
            model=message.model,
            state=_STATES.get(message.state, "unknown"),
            progress=IngestProgress.from_message(message),
            layout=_LAYOUT_NAMES.get(message.prompt_layout),
            token_count=message.token_count,
            bytes_on_disk=message.bytes,
            kv_bytes_16bit=message.kv_bytes_16bit,
            created=_moment(message.create_time, message.HasField("create_time")),
            expires=_moment(message.expire_time, message.HasField("expire_time")),
            timing=IngestTiming(
                timing.tokenize_s, timing.prefill_s, timing.build_s, timing.write_s
            ),
            error_reason=message.error.reason,
            error_message=message.error.message,
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of a stored context found in order.

    `probes_checked` stored queries were answered again; `largest_error` is the largest difference
    from their stored answers.
    """

    records_checked: int
    bytes_checked: int
    probes_checked: int
    largest_error: float

    @classmethod
    def from_message(cls, message: pb.VerifyContextResponse) -> "Verification":
        """Read the service's message; the fields have the same names on the wire."""
        return cls(**{name: getattr(message, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a document would cost: `kv_bytes` are its keys and values at two bytes a number.

    Stored, with the index, it takes about 1.3 times as many.
    """

    tokens: int
    kv_bytes: int

    @classmethod
    def from_message(cls, message: pb.CountTokensResponse) -> "TokenCost":
        """Read the service's message."""
        return cls(message.token_count, message.bytes)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one ask. `answer_tokens` counts what was generated; an end-of-turn token is not."""

    context_tokens: int
    question_tokens: int
    answer_tokens: int

    @classmethod
    def from_message(cls, message: pb.Usage) -> "Usage":
        """Read the service's message."""
        return cls(message.context_tokens, message.question_tokens, message.answer_tokens)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an ask really did; docs/RECEIPT.md explains every field.

    `tokens_reused` came from the store, `tokens_prefilled` were forwarded before the first answer
    token. `keys_scored` and `centroids_scored` are shares (0 to 1) of the context's tokens and
    `keys_read` a number of keys, all of them means over generated tokens, layers and KV heads;
    `mass_estimated` is a share (0 to 1) of the attention. Times are milliseconds; `token_ms` is
    the mean of the tokens after the first, `middle_ms` and `device_ms` are parts of it.
    """

    tokens_reused: int
    tokens_prefilled: int
    keys_scored: float
    centroids_scored: float
    keys_read: float
    mass_estimated: float
    open_ms: float
    queue_ms: float
    question_ms: float
    first_token_ms: float
    token_ms: float
    middle_ms: float
    device_ms: float
    budget: str
    plan: str
    bytes_mapped: int

    @classmethod
    def from_message(cls, message: pb.Receipt) -> "Receipt":
        """Read the service's message; the fields have the same names on the wire."""
        return cls(**{name: getattr(message, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer."""

    text: str
    usage: Usage
    receipt: Receipt
    finish_reason: FinishReason

    @classmethod
    def from_message(cls, text: str, message: pb.AskFinal) -> "Result":
        """Join the streamed text and the service's final message."""
        return cls(
            text,
            Usage.from_message(message.usage),
            Receipt.from_message(message.receipt),
            _FINISH_REASONS.get(message.finish_reason, "unknown"),
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the service answers with; `tokens_forwarded` counts since it was loaded."""

    name: str
    fingerprint: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    positions_max: int
    layouts: tuple[Layout, ...]
    tokens_forwarded: int

    @classmethod
    def from_message(cls, message: pb.Model) -> "Model":
        """Read the service's message; layouts that this client does not know are left out."""
        layouts = (_LAYOUT_NAMES.get(number) for number in message.prompt_layouts)
        return cls(
            name=message.name,
            fingerprint=message.fingerprint,
            layers=message.layers,
            query_heads=message.query_heads,
            kv_heads=message.kv_heads,
            head_dim=message.head_dim,
            positions_max=message.positions_max,
            layouts=tuple(name for name in layouts if name is not None),
            tokens_forwarded=message.tokens_forwarded,
        )


def _moment(stamp: Timestamp, is_set: bool) -> datetime | None:
    """Return a timestamp in UTC, or None when the service set none."""
    return stamp.ToDatetime(tzinfo=UTC) if is_set else None
