"""What both clients send and how they read an outcome: checks, messages, deadlines.

Knows: the messages of openbook.v1. Does not know: channels, or whether a call blocks or is awaited.
"""

import math
import re
import time
from collections.abc import Iterator
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from openbook.client.channel import MESSAGE_BYTES_MAX
from openbook.client.errors import DeadlineExceeded, ServerFault, from_reason
from openbook.client.uploads import Upload, utf8
from openbook.client.views import LAYOUTS, Layout
from openbook.v1 import contexts_pb2 as pb

UNARY_TIMEOUT_S = 30.0  # for calls that only look something up
TIMEOUT_S_MAX = (
    10 * 365 * 86_400.0
)  # far beyond that, gRPC's clock overflows and ends calls at once
TTL_S_MAX = 10 * 366 * 86_400.0  # the service's limit
COUNT_BYTES_MAX = MESSAGE_BYTES_MAX - 4096  # a document to count is one message, with its fields
SHOWN_MAX = 40  # characters of a wrong id that its error repeats
_ID = re.compile(r"[0-9a-f]{32}")

Ttl = timedelta | float


class Deadline:
    """What is left of a timeout that several calls share."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is None:
            self._end = None
            return
        if not 0 < timeout < math.inf:
            raise ValueError(
                f"timeout is {timeout}; it must be a number of seconds above 0, or None for no end"
            )
        self._end = time.monotonic() + min(timeout, TIMEOUT_S_MAX)

    def left(self) -> float | None:
        """Return the seconds left, or None when there is no end; raises DeadlineExceeded."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the timeout has passed", status="DEADLINE_EXCEEDED")
        return left

    def allows(self, pause_s: float) -> bool:
        """Tell whether something can still be done after `pause_s`."""
        return self._end is None or time.monotonic() + pause_s < self._end


def context_name(context_id: str) -> str:
    """Return the resource name of a context given by id or by name.

    Raises TypeError or ValueError for what is neither; the latter repeats its beginning.
    """
    if not isinstance(context_id, str):
        raise TypeError(f"context_id must be a str, not {type(context_id).__name__}")
    plain = context_id.removeprefix("contexts/")
    if _ID.fullmatch(plain) is None:
        shown = plain if len(plain) <= SHOWN_MAX else f"{plain[: SHOWN_MAX - 1]}…"
        raise ValueError(  # repr escapes what a terminal would obey
            f"{shown!r} is not a context id (32 hexadecimal digits; see `openbook contexts list`)"
        )
    return f"contexts/{plain}"


def ingest_metadata(
    *, display_name: str, model: str, layout: Layout | None, ttl: Ttl | None
) -> pb.IngestContextRequest.Metadata:
    """Return the first message of an ingest, still without name and digest of the document."""
    utf8(display_name, "display_name")
    utf8(model, "model")
    return pb.IngestContextRequest.Metadata(
        display_name=display_name,
        model=model,
        prompt_layout=_prompt_layout(layout),
        ttl=None if ttl is None else _duration(ttl),
    )


def describe(metadata: pb.IngestContextRequest.Metadata, upload: Upload) -> None:
    """Put into the first message what only the opened document tells."""
    metadata.display_name = metadata.display_name or upload.name
    metadata.sha256 = upload.sha256


def upload_requests(
    metadata: pb.IngestContextRequest.Metadata, upload: Upload
) -> Iterator[pb.IngestContextRequest]:
    """Yield the messages of an ingest, one chunk in memory at a time."""
    yield pb.IngestContextRequest(metadata=metadata)
    for chunk in upload.chunks():
        yield pb.IngestContextRequest(chunk=chunk)


def update_request(context_id: str, ttl: Ttl | None) -> pb.UpdateContextRequest:
    """Return the request that sets a time to live; None is for ever."""
    name = context_name(context_id)
    return pb.UpdateContextRequest(name=name, ttl=None if ttl is None else _duration(ttl))


def count_request(upload: Upload, *, model: str, layout: Layout | None) -> pb.CountTokensRequest:
    """Return the request that counts a document; reads it whole.

    Raises ValueError for one that does not fit into a message, OSError when reading fails.
    """
    utf8(model, "model")
    if upload.bytes_total > COUNT_BYTES_MAX:
        raise ValueError(
            f"the document is {upload.bytes_total} bytes; at most {COUNT_BYTES_MAX} are counted"
        )
    document = b"".join(upload.chunks())
    if upload.failure is not None:
        raise upload.failure
    return pb.CountTokensRequest(
        document=document, model=model, prompt_layout=_prompt_layout(layout)
    )


def settled_id(context: pb.Context) -> str:
    """Return the id of a context that can be asked; raises what kept it from that."""
    if context.state == pb.CONTEXT_STATE_FAILED:
        raise from_reason(context.error.reason, context.error.message)
    if context.state != pb.CONTEXT_STATE_ACTIVE:
        raise ServerFault("the service stopped watching a context that is still being read")
    return plain_id(context)


def plain_id(context: pb.Context) -> str:
    """Return the id in a context's name."""
    return context.name.removeprefix("contexts/")


def _prompt_layout(layout: Layout | None) -> pb.PromptLayout:
    """Return the service's number of a layout."""
    if layout is not None and layout not in LAYOUTS:
        raise ValueError("layout must be 'chat', 'completion' or None")
    return LAYOUTS[layout] if layout else pb.PROMPT_LAYOUT_UNSPECIFIED


def _duration(ttl: Ttl) -> Duration:
    """Return a time to live; raises TypeError or ValueError for none that the service takes."""
    if isinstance(ttl, bool) or not isinstance(ttl, timedelta | float | int):
        raise TypeError(f"ttl must be a timedelta or seconds, not {type(ttl).__name__}")
    seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if not 0 < seconds <= TTL_S_MAX:
        raise ValueError(
            f"ttl is {seconds} seconds; it must be above 0 and at most {TTL_S_MAX:.0f}"
        )
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))
