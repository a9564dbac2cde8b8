"""Reading one context: verified, mapped read-only, held.

Owns the open context: what of it is mapped, and the order of the checks before that. It knows
nothing of locks and files (held.py), of models, of leases between workers or of where contexts
are (store.py).

Order of an open: lock the manifest (shared) and see that it is still the one at its path; check
it and the model's fingerprint; compare every file's size, since a mapped page past the end is a
SIGBUS; then, layer by layer, check the digest of each MiB by read(), map the file, check each
record's header against the manifest and its digest, and each id that a search follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.errors import FingerprintMismatch
from openbook.indexstore.held import HeldContext, Verify, hold
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.layout import Kind
from openbook.indexstore.manifest import Manifest
from openbook.indexstore.mapped import any_damage
from openbook.indexstore.shard import Shard


class StoredContext:
    """An open context: its manifest, its tokens and its layers, until closed.

    The layers' arrays are borrowed and die at close: keep none. (One that is kept all the same
    keeps its layer mapped; it never becomes a wild pointer.) The shared flock on the manifest
    keeps the context from being deleted meanwhile. Several opens in one process share the maps.
    """

    def __init__(self, held: HeldContext) -> None:
        """Take over a held context (open_context)."""
        self.manifest = held.manifest
        self.token_ids: NDArray[np.int32] = np.empty(0, np.int32)  # (n,)
        self.offsets: NDArray[np.int32] = np.empty((0, 2), np.int32)  # (n, 2)
        self._held: HeldContext | None = held
        self._shards: list[Shard] = []
        self._layers: list[LayerRecords] = []

    @property
    def bytes_mapped(self) -> int:
        """The size of the mapped layer files; 0 once closed."""
        return sum(f.bytes for f in self.manifest.files[1 : len(self._layers) + 1])

    def layer(self, layer: int) -> LayerRecords:
        """Return a layer's arrays as read-only views. Raises ValueError once closed."""
        if self._held is None:
            raise ValueError("the context is closed")
        return self._layers[layer]

    def check(self) -> None:
        """Raise if a mapped page was missing when it was read, and zeros were read instead.

        That is so when a file is cut short under its readers, or its disk fails. Call it after
        reading and before believing: it costs next to nothing while all is well.
        Raises ShardTruncated or ShardCorrupt, then and at every later call.
        """
        if any_damage():
            for shard in self._shards:
                shard.check()

    def close(self) -> None:
        """Drop the views and the lock. May be called again."""
        self._layers, self._shards = [], []
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def __enter__(self) -> StoredContext:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_context(
    path: Path,
    *,
    model_fingerprint: str | None,
    verify: Verify = "full",
    on_layer: Callable[[int], None] | None = None,
) -> StoredContext:
    """Open the context at `path` for reading; the caller closes it.

    `verify="full"` reads and digests every byte first (and so warms the page cache). "size" trusts
    the pages' contents, LMDB's own included: only for files already verified. `on_layer` is called
    with each layer's number once it is ready, in order. `model_fingerprint=None` accepts any.

    Raises ContextMissing, ContextIncomplete, ContextInUse (being deleted), FormatUnsupported,
    FingerprintMismatch, ShardCorrupt, ShardTruncated or StoreReadFailed.
    """
    held = hold(path)
    context = StoredContext(held)
    try:
        _check_fingerprint(held.manifest, model_fingerprint)
        held.check_sizes()
        tokens, *layers = held.manifest.files
        shard = held.shard(tokens, verify)
        context.token_ids = _owned(shard.read(Kind.TOKENS, None, check_digest=verify == "full"))
        context.offsets = _owned(shard.read(Kind.OFFSETS, None, check_digest=verify == "full"))
        shard.check()
        del shard
        for layer, file in enumerate(layers):
            context._shards.append(held.shard(file, verify))
            context._layers.append(held.records(context._shards[-1], verify))
            if on_layer is not None:
                on_layer(layer)
        held.forget_directory()
    except BaseException:
        context.close()
        raise
    return context


def _check_fingerprint(manifest: Manifest, expected: str | None) -> None:
    if expected is not None and manifest.model_fingerprint != expected:
        raise FingerprintMismatch("model_fingerprint", expected, manifest.model_fingerprint)


def _owned(view: NDArray[np.int32]) -> NDArray[np.int32]:
    """Copy a small record, so that its file is unmapped again."""
    array = view.copy()
    array.flags.writeable = False
    return array
