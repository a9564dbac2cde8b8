"""Contexts that are open in this process: verified, mapped, their windows pinned.

Owns who holds an open context and when it is let go: the first open loads it, later ones share it,
the last close unmaps it. It knows nothing of asks, leases or where contexts are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from openbook.indexstore.errors import FingerprintMismatch
from openbook.indexstore.head import LayerIndex
from openbook.indexstore.store import Manifest, StoredContext, open_context, read_manifest
from openbook.worker.fingerprint import FingerprintFields
from openbook.worker.models import Model
from openbook.worker.window import Window


@dataclass(slots=True)
class _Loaded:
    """One context in memory and the number of handles on it."""

    stored: StoredContext
    window: Window
    layers: tuple[LayerIndex, ...]  # views of the mapped files
    holders: int = 0
    is_closed: bool = False


class OpenedContext:
    """A claim on an open context; everyone who reads has one of their own and closes it.

    `layers` are borrowed views: they may be read while this claim is open, and not after.
    """

    def __init__(self, owner: OpenContexts, key: tuple[Path, str], loaded: _Loaded) -> None:
        """Made by OpenContexts alone, which has counted this claim."""
        self._owner = owner
        self._key = key
        self._loaded: _Loaded | None = loaded

    @property
    def manifest(self) -> Manifest:
        """The sealed description of the context."""
        return self._held().stored.manifest

    @property
    def token_count(self) -> int:
        """The number of context tokens, n."""
        return self.manifest.token_count

    @property
    def bytes_mapped(self) -> int:
        """The size of the files mapped to answer."""
        return self._held().stored.bytes_mapped

    @property
    def window(self) -> Window:
        """The window on the device, shared by all claims."""
        return self._held().window

    @property
    def layers(self) -> tuple[LayerIndex, ...]:
        """Per layer the index and the plan of every KV head; none of them without a middle."""
        return self._held().layers

    @property
    def is_open(self) -> bool:
        """Whether this claim has not been closed."""
        return self._loaded is not None

    def check(self) -> None:
        """Raise ShardTruncated or ShardCorrupt if a file was cut short while it was read."""
        self._held().stored.check()

    def hold(self) -> OpenedContext:
        """Return another claim on the same context. Raises ValueError when this one is closed."""
        return self._owner.share(self._key, self._held())

    def close(self) -> None:
        """Give this claim back; the last one unmaps the files. May be called again."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._owner.give_back(self._key, loaded)

    def _held(self) -> _Loaded:
        if self._loaded is None:
            raise ValueError("this claim on the context is closed")
        return self._loaded


class OpenContexts:
    """The open contexts of one model. Every method may be called from any thread."""

    def __init__(self, model: Model, *, clock: Callable[[], float]) -> None:
        """Open contexts for `model` and no other; `clock` counts seconds."""
        self.loads = 0  # contexts really loaded, not shared
        self._model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._futures: dict[tuple[Path, str], Future[_Loaded]] = {}

    def open(self, path: Path, context_id: str) -> OpenedContext:
        """Return a claim on the context at `path`, loading it unless it is open.

        Callers that come while it loads wait for that one load. Raises the store's errors.
        """
        key = (path, context_id)
        while True:
            with self._lock:
                future = self._futures.get(key)
                is_loader = future is None
                if future is None:
                    future = self._futures[key] = Future()
            if is_loader:
                self._load(key, future)
            loaded = future.result()
            with self._lock:
                if loaded.is_closed:
                    continue  # by its last holder, before this claim was counted
                loaded.holders += 1
            return OpenedContext(self, key, loaded)

    def retire(self, path: Path, context_id: str) -> None:
        """Have the next open read the files anew; the claims that there are stay as they are."""
        with self._lock:
            self._futures.pop((path, context_id), None)

    def share(self, key: tuple[Path, str], loaded: _Loaded) -> OpenedContext:
        """Count one more claim on a context that someone holds. Raises ValueError if none does."""
        with self._lock:
            if loaded.holders == 0:
                raise ValueError("the last claim on the context has just been closed")
            loaded.holders += 1
        return OpenedContext(self, key, loaded)

    def give_back(self, key: tuple[Path, str], loaded: _Loaded) -> None:
        """Count one claim less; close the files after the last."""
        with self._lock:
            loaded.holders -= 1
            if loaded.holders:
                return
            loaded.is_closed = True
            future = self._futures.get(key)
            if future is not None and future.done() and future.result() is loaded:
                del self._futures[key]  # unless it was retired
        loaded.layers = ()
        loaded.stored.close()

    @property
    def open_count(self) -> int:
        """The number of contexts in memory or on their way there."""
        with self._lock:
            return len(self._futures)

    def _load(self, key: tuple[Path, str], future: Future[_Loaded]) -> None:
        """Load a context into its future; a failure is everyone's who waits, and forgotten."""
        try:
            loaded = _load(self._model, *key)
        except BaseException as error:
            with self._lock:
                if self._futures.get(key) is future:
                    del self._futures[key]
            future.set_exception(error)
            return
        with self._lock:
            self.loads += 1
        future.set_result(loaded)


def _load(model: Model, path: Path, context_id: str) -> _Loaded:
    promised = read_manifest(path)
    fields = model.fingerprint_fields.stored_as(
        prompt_layout=promised.prompt_layout, kv_dtype=promised.kv_dtype
    )
    if promised.model_fingerprint != fields.digest():
        raise _mismatch(promised, fields)
    stored = open_context(path, model_fingerprint=fields.digest())
    try:
        _check(model, stored.manifest, context_id)
        layers = [stored.layer(layer) for layer in range(stored.manifest.layers)]
        window = Window.load(
            layers, stored.manifest.token_count, device=model.device, dtype=model.module.dtype
        )
        stored.check()  # the windows' rows have just been read
        plans = stored.manifest.plan
        return _Loaded(
            stored,
            window,
            tuple(LayerIndex(one.heads, plan) for one, plan in zip(layers, plans, strict=True)),
        )
    except BaseException:
        stored.close()
        raise


def _mismatch(manifest: Manifest, fields: FingerprintFields) -> FingerprintMismatch:
    """Name the first part of the model that is not the one the context was made with."""
    stored = dict(manifest.model_parts)
    for part, expected in fields.parts().items():
        if part in stored and stored[part] != expected:
            return FingerprintMismatch(part, expected, stored[part])
    return FingerprintMismatch("model_fingerprint", fields.digest(), manifest.model_fingerprint)


def _check(model: Model, manifest: Manifest, context_id: str) -> None:
    """Refuse a context whose fingerprint fits and whose numbers do not: a forged manifest."""
    shape = model.shape
    for field, expected, found in (
        ("context_id", context_id, manifest.context_id),
        ("layers", shape.layers, manifest.layers),
        ("query_heads", shape.query_heads, manifest.query_heads),
        ("kv_heads", shape.kv_heads, manifest.kv_heads),
        ("head_dim", shape.head_dim, manifest.head_dim),
        ("value_dim", shape.value_dim, manifest.value_dim),
        ("scaling", shape.scalings, manifest.scaling),
    ):
        if expected != found:
            raise FingerprintMismatch(field, str(expected), str(found))
    if manifest.token_count > shape.positions_max:
        raise FingerprintMismatch(
            "token_count", f"at most {shape.positions_max}", str(manifest.token_count)
        )
