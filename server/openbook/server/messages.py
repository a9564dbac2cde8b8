"""The server's words as messages of openbook.v1, and the caller's back.

Owns the translation and the checks of single fields. It knows nothing of what happens next.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet

from openbook.indexstore.verify import VerifyReport
from openbook.server.catalog import Entry, Stage, State
from openbook.server.documents import NAME_BYTES_MAX
from openbook.server.errors import ArgumentInvalid, FieldNotSupported, ModelUnknown
from openbook.server.lives import TTL_S_MAX, check_ttl
from openbook.server.naming import name_of
from openbook.v1 import contexts_pb2 as pb
from openbook.worker import Finished, Model

PAGE_SIZE_DEFAULT = 50
PAGE_SIZE_MAX = 1000
DIGEST_BYTES = 32
TREACHEROUS = ("Cc", "Cs", "Zl", "Zp")  # controls, halves of pairs, line and paragraph separators
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
TIMESTAMP_S_MAX = 253_402_300_799  # 9999-12-31T23:59:59Z, where protobuf's Timestamp ends

LAYOUTS: Mapping[pb.PromptLayout, str] = {
    pb.PROMPT_LAYOUT_CHAT: "chat",
    pb.PROMPT_LAYOUT_COMPLETION: "completion",
}
LAYOUT_NUMBERS = {name: number for number, name in LAYOUTS.items()}
STATES = {
    State.CREATING: pb.CONTEXT_STATE_CREATING,
    State.ACTIVE: pb.CONTEXT_STATE_ACTIVE,
    State.FAILED: pb.CONTEXT_STATE_FAILED,
}
STAGES = {
    Stage.QUEUED: pb.INGEST_STAGE_QUEUED,
    Stage.READING: pb.INGEST_STAGE_READING,
    Stage.SEALING: pb.INGEST_STAGE_SEALING,
    Stage.DONE: pb.INGEST_STAGE_DONE,
}
FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def context_message(entry: Entry, expire_unix_s: float | None) -> pb.Context:
    """Return a context as callers see it; `expire_unix_s` is None if it never expires."""
    message = pb.Context(
        name=name_of(entry.context_id),
        display_name=entry.display_name,
        model=entry.model,
        state=STATES[entry.state],
        token_count=entry.token_count,
        bytes=entry.bytes,
        kv_bytes_16bit=entry.kv_bytes_16bit,
        prompt_layout=LAYOUT_NUMBERS.get(entry.layout, pb.PROMPT_LAYOUT_UNSPECIFIED),
        create_time=_timestamp(entry.created_unix_s),
    )
    if expire_unix_s is not None:
        message.expire_time.CopyFrom(_timestamp(expire_unix_s))
    if entry.state is not State.FAILED:
        message.progress.CopyFrom(
            pb.Progress(
                stage=STAGES[entry.stage], layers_done=entry.layers_done, layers=entry.layers
            )
        )
    if entry.state is State.FAILED:
        message.error.CopyFrom(pb.ContextError(reason=entry.error_reason, message=entry.error_text))
    if entry.state is State.ACTIVE:
        spent = entry.timing
        message.timing.CopyFrom(
            pb.IngestTiming(
                tokenize_s=spent.tokenize_s,
                prefill_s=spent.prefill_s,
                build_s=spent.build_s,
                write_s=spent.write_s,
            )
        )
    return message


def model_message(model: Model) -> pb.Model:
    """Return the served model as callers see it."""
    shape = model.shape
    return pb.Model(
        name=model.name,
        fingerprint=model.fingerprint,
        layers=shape.layers,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        positions_max=shape.positions_max,
        prompt_layouts=[LAYOUT_NUMBERS[name] for name in model.prompt_layouts],
        tokens_forwarded=model.tokens_forwarded,
    )


def cost_message(tokens: int, model: Model) -> pb.CountTokensResponse:
    """Return what a document of so many context tokens costs."""
    shape = model.shape
    per_token = shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim)
    return pb.CountTokensResponse(token_count=tokens, bytes=2 * per_token * tokens)


def verify_message(report: VerifyReport) -> pb.VerifyContextResponse:
    """Return what a verification looked at."""
    return pb.VerifyContextResponse(
        records_checked=report.records_checked,
        bytes_checked=report.bytes_checked,
        probes_checked=report.probes_checked,
        largest_error=report.largest_error,
    )


def final_message(finished: Finished) -> pb.AskResponse:
    """Return the last message of an answer; a receipt's fields have one name everywhere."""
    receipt = pb.Receipt()
    for field in pb.Receipt.DESCRIPTOR.fields:
        setattr(receipt, field.name, getattr(finished.receipt, field.name))
    usage = pb.Usage(
        context_tokens=finished.usage.context_tokens,
        question_tokens=finished.usage.question_tokens,
        answer_tokens=finished.usage.answer_tokens,
    )
    final = pb.AskFinal(
        usage=usage, finish_reason=FINISH_REASONS[finished.finish_reason], receipt=receipt
    )
    return pb.AskResponse(final=final)


def check_metadata(metadata: pb.IngestContextRequest.Metadata, model: Model) -> str:
    """Check an upload's first message and return its prompt layout.

    Raises ArgumentInvalid, FieldNotSupported or ModelUnknown.
    """
    refuse_unknown_fields(metadata)
    if len(metadata.display_name.encode()) > NAME_BYTES_MAX:
        raise ArgumentInvalid("display_name", f"may have at most {NAME_BYTES_MAX} bytes")
    if any(_is_treacherous(character) for character in metadata.display_name):
        raise ArgumentInvalid(
            "display_name", "may hold no control characters, line breaks or changes of direction"
        )
    if metadata.sha256 and len(metadata.sha256) != DIGEST_BYTES:
        raise ArgumentInvalid("sha256", f"must have {DIGEST_BYTES} bytes")
    return check_layout(metadata.model, metadata.prompt_layout, model)


def check_layout(named: str, prompt_layout: pb.PromptLayout, model: Model) -> str:
    """Return the prompt layout that is meant. Raises ModelUnknown or ArgumentInvalid.

    Without a layout the model's chat template is used if it has one.
    """
    if named not in ("", model.name):
        raise ModelUnknown()
    if prompt_layout == pb.PROMPT_LAYOUT_UNSPECIFIED:
        return "chat" if "chat" in model.prompt_layouts else "completion"
    layout = LAYOUTS.get(prompt_layout)
    if layout is None:
        raise ArgumentInvalid("prompt_layout", "is not a prompt layout")
    if layout not in model.prompt_layouts:
        raise ArgumentInvalid("prompt_layout", "is not one that this model has")
    return layout


def _is_treacherous(character: str) -> bool:
    """Tell whether a character in a name changes the line that a person reads it in.

    Other invisible ones are parts of ordinary names: wide spaces, and what joins emoji.
    """
    return unicodedata.category(character) in TREACHEROUS or character in DIRECTIONS


def ttl_s(duration: Duration) -> float:
    """Return a time to live in seconds. Raises ArgumentInvalid unless it is one."""
    seconds = duration.seconds + duration.nanos / 1e9
    try:
        check_ttl(seconds)
    except ValueError:
        raise ArgumentInvalid(
            "ttl", f"must be above 0 and at most {TTL_S_MAX:.0f} seconds"
        ) from None
    return seconds


def page_size(request: pb.ListContextsRequest) -> int:
    """Return how many contexts a page holds. Raises ArgumentInvalid."""
    if request.page_size < 0:
        raise ArgumentInvalid("page_size", "must not be negative")
    return min(request.page_size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def refuse_unknown_fields(message: Message) -> None:
    """Refuse what a newer client sends and this server would ignore. Raises FieldNotSupported."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise FieldNotSupported(f"field {unknown[0].field_number}")


def _timestamp(unix_s: float) -> Timestamp:
    """Return a time as a message; one that no message can hold, as the nearest.

    A manifest may hold any number of seconds, and one odd manifest must not end a listing.
    """
    message = Timestamp()
    message.FromMilliseconds(round(min(max(unix_s, 0), TIMESTAMP_S_MAX) * 1000))
    return message
