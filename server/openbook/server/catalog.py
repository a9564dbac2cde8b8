"""Which contexts there are, and in which state.

Owns the entries, their order, and who is told when one changes. It lives on the event loop's
thread. It knows nothing of gRPC. The disk decides: at start the entries are read from it, and an
entry is ACTIVE only when its context has been published there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from weakref import WeakValueDictionary

from openbook.indexstore.errors import IndexStoreError, ShardCorrupt
from openbook.indexstore.store import Summary, list_contexts, read_summary
from openbook.server.errors import ContextUnknown, PageTokenInvalid, describe
from openbook.server.identity import is_context_id

PAGE_TOKEN = re.compile(r"([0-9]{1,20}):([0-9a-f]{32})")


class State(Enum):
    """A context is being read, can be asked, or could not be read."""

    CREATING = "creating"
    ACTIVE = "active"
    FAILED = "failed"


class Stage(Enum):
    """Where the reading of a document is."""

    QUEUED = "queued"
    READING = "reading"
    SEALING = "sealing"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each stage of an ingest."""

    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    build_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about one context. `fingerprint` is empty unless it is published.

    `caller` is who sent it, as far as this process knows; none is known after a restart.
    """

    context_id: str
    model: str
    layout: str
    state: State
    created_unix_s: float
    display_name: str = ""
    stage: Stage = Stage.QUEUED
    layers_done: int = 0
    layers: int = 0
    fingerprint: str = ""
    token_count: int = 0
    bytes: int = 0
    kv_bytes_16bit: int = 0
    timing: Timing = Timing()
    error_reason: str = ""
    error_text: str = ""
    caller: str = ""

    def activated(self, summary: Summary) -> Entry:
        """Return this entry as the published context that `summary` describes."""
        spent = summary.stages_s
        return replace(
            self,
            model=summary.model_name,
            layout=summary.prompt_layout,
            state=State.ACTIVE,
            created_unix_s=float(summary.created_unix_s),
            stage=Stage.DONE,
            layers_done=summary.layers,
            layers=summary.layers,
            fingerprint=summary.model_fingerprint,
            token_count=summary.token_count,
            bytes=summary.bytes_total,
            kv_bytes_16bit=summary.kv_bytes_16bit,
            timing=Timing(spent.tokenize, spent.prefill, spent.build, spent.write),
            error_reason="",
            error_text="",
        )

    def failed(self, error: Exception) -> Entry:
        """Return this entry as one that could not be read, or can no longer be."""
        wire = describe(error)
        return replace(self, state=State.FAILED, error_reason=wire.reason, error_text=wire.text)


class Catalog:
    """The entries of one data directory; every method runs on the event loop's thread."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = {entry.context_id: entry for entry in entries}
        self._changed: dict[str, asyncio.Event] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def changing(self, context_id: str) -> asyncio.Lock:
        """Return the lock of a context's files; whoever changes them holds it, in turn.

        An entry may change without it: after each wait under the lock, look again.
        """
        return self._locks.setdefault(context_id, asyncio.Lock())

    def find(self, context_id: str) -> Entry | None:
        """Return the entry of a context, or None."""
        return self._entries.get(context_id)

    def get(self, context_id: str) -> Entry:
        """Return the entry of a context. Raises ContextUnknown."""
        entry = self._entries.get(context_id)
        if entry is None:
            raise ContextUnknown()
        return entry

    def entries(self) -> list[Entry]:
        """Return every entry, in no order."""
        return list(self._entries.values())

    def put(self, entry: Entry) -> None:
        """Set an entry and wake whoever watches it."""
        self._entries[entry.context_id] = entry
        self._wake(entry.context_id)

    def remove(self, context_id: str) -> None:
        """Forget a context; its watchers get ContextUnknown."""
        self._entries.pop(context_id, None)
        self._wake(context_id)

    def progress(self, context_id: str, stage: Stage, layers_done: int, layers: int) -> None:
        """Note how far the reading of a document is; too late is ignored."""
        entry = self._entries.get(context_id)
        if entry is not None and entry.state is State.CREATING:
            self.put(replace(entry, stage=stage, layers_done=layers_done, layers=layers))

    async def watch(self, context_id: str) -> AsyncGenerator[Entry, None]:
        """Yield the entry now and at each change, until it is no longer CREATING.

        A slow watcher gets the latest entry and misses those before. Raises ContextUnknown.
        """
        while True:
            entry = self.get(context_id)
            changed = self._changed.setdefault(context_id, asyncio.Event())
            yield entry
            if entry.state is not State.CREATING:
                return
            await changed.wait()

    def page(self, size: int, token: str) -> tuple[list[Entry], str]:
        """Return up to `size` entries, newest first, after `token`, and the next page's token.

        An entry that comes or goes between two pages moves no other one. Raises PageTokenInvalid.
        """
        after = _parse_token(token) if token else None
        ordered = sorted(self._entries.values(), key=_place)
        rest = [entry for entry in ordered if after is None or _place(entry) > after]
        entries = rest[:size]
        return entries, _token_of(entries[-1]) if len(rest) > size else ""

    def _wake(self, context_id: str) -> None:
        changed = self._changed.pop(context_id, None)
        if changed is not None:
            changed.set()


def read_entries(tenant_root: Path) -> list[Entry]:
    """Return an entry for each context published under `tenant_root`; may block.

    One whose manifest cannot be read, or names another context, is listed as FAILED.
    """
    entries = []
    for path in list_contexts(tenant_root):
        if not is_context_id(path.name):
            continue
        entry = Entry(path.name, "", "", State.FAILED, 0.0)
        try:
            summary = read_summary(path)
            if summary.context_id != path.name:
                raise ShardCorrupt("manifest.json", "names another context")
            entries.append(entry.activated(summary))
        except IndexStoreError as error:
            entries.append(entry.failed(error))
    return entries


def _place(entry: Entry) -> tuple[int, str]:
    """Order by age, newest first, to the millisecond."""
    return -round(entry.created_unix_s * 1000), entry.context_id


def _token_of(entry: Entry) -> str:
    text = f"{round(entry.created_unix_s * 1000)}:{entry.context_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parse_token(token: str) -> tuple[int, str]:
    try:
        padded = token.encode("ascii") + b"=" * (-len(token) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except (UnicodeError, binascii.Error) as error:
        raise PageTokenInvalid() from error
    match = PAGE_TOKEN.fullmatch(text)
    if match is None:
        raise PageTokenInvalid()
    return -int(match[1]), match[2]
