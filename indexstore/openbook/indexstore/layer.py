"""The arrays of one layer of a context, as they are written and as they are read back.

Owns the list of a layer's records and the checks of their values. It knows nothing of bytes
(layout.py) or files (shard.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openbook.indexstore.head import HeadIndex, Stored
from openbook.indexstore.layout import (
    HEAD_KINDS,
    LAYER_KINDS,
    Kind,
    RecordInfo,
    check_shapes,
    info_of,
)

# What a search or an estimate is made of, besides spreads; keys and values are checked when stored.
_FINITE = ("centroids", "value_sums", "codebook", "code_basis", "code_spreads", "centre", "scale")

_LABELS_OF_HEAD = tuple(kind.label for kind in HEAD_KINDS)
assert set(_LABELS_OF_HEAD) == {f.name for f in fields(HeadIndex) if f.init}, "one record per array"


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """Everything the store keeps of one layer.

    Hkv KV heads, Hq query heads, w window tokens (all of a context of up to 640 tokens, else the
    first 128 and the last 512, in order), s training queries of each KV head's group, p probe
    queries of each query head; s and p may be 0. `heads` is empty when there is no middle.
    The probes' exact attention over the middle is `probe_out` with `probe_lse` (natural log).
    Read back, the arrays are read-only views that live as long as the StoredContext is open.
    """

    heads: tuple[HeadIndex, ...]
    window_keys: Stored  # (Hkv, w, d)
    window_values: Stored  # (Hkv, w, dv)
    train_queries: NDArray[Any]  # (Hkv, s, d) float16 or float32
    train_positions: NDArray[np.int32]  # (Hkv, s)  where each training query stood in the text
    probe_queries: NDArray[np.float32]  # (Hq, p, d)
    probe_out: NDArray[np.float32]  # (Hq, p, dv)
    probe_lse: NDArray[np.float32]  # (Hq, p)


_LABELS_OF_LAYER = ("heads", *(kind.label for kind in LAYER_KINDS))
assert _LABELS_OF_LAYER == tuple(f.name for f in fields(LayerRecords)), "one record per array"


def layer_arrays(records: LayerRecords) -> Iterator[tuple[Kind, int | None, NDArray[Any]]]:
    """Yield every array of a layer with its kind and KV head, in the order they are written."""
    for kind in LAYER_KINDS:
        yield kind, None, getattr(records, kind.label)
    for head, index in enumerate(records.heads):
        for kind in HEAD_KINDS:
            array = getattr(index, kind.label)
            if array is not None:
                yield kind, head, array


def layer_from(
    read: Callable[[Kind, int | None], NDArray[Any]], kinds: Sequence[Sequence[Kind]]
) -> LayerRecords:
    """Put a layer together from `read(kind, head)`, each head of its `kinds`.

    The inverse of layer_arrays.
    """
    return LayerRecords(
        heads=tuple(
            HeadIndex(**{kind.label: read(kind, head) for kind in mine})
            for head, mine in enumerate(kinds)
        ),
        **{kind.label: read(kind, None) for kind in LAYER_KINDS},
    )


def layer_infos(records: LayerRecords, layer: int) -> list[RecordInfo]:
    """Describe every record of a layer, in writing order.

    Raises ValueError when an array's dtype or shape does not belong, naming the record.
    """
    infos = [info_of(k, a, layer=layer, head=h) for k, h, a in layer_arrays(records)]
    check_shapes(infos, {"kv": len(records.heads)} if records.heads else {})
    return infos


def check_head(index: HeadIndex, head: int) -> None:
    """Check what a search follows blindly: ids it reads, counts it subtracts, bounds it trusts.

    Shapes are checked before (layout.check_shapes). Raises ValueError naming the head.
    """
    middle, clusters = index.middle_tokens, index.centroids.shape[0]
    for name, ids, limit in (
        ("graph", index.graph, middle),
        ("entries", index.entries, middle),
        ("members", index.members, middle),
        ("cluster_of", index.cluster_of, clusters),
    ):
        if ids is not None and ids.size and int(ids.max()) >= limit:
            raise ValueError(f"head {head}: {name} holds id {int(ids.max())} of {limit}")
    if not np.isfinite(index.spreads).all() or (index.spreads < 0).any():
        raise ValueError(f"head {head}: spreads holds a number that is negative or not finite")
    held = np.bincount(index.cluster_of, minlength=clusters)
    if not np.array_equal(held, index.counts):
        raise ValueError(f"head {head}: counts differ from the members of the clusters")
    if not held.all():
        raise ValueError(f"head {head}: a cluster has no members")
    for name in _FINITE:
        array = getattr(index, name)
        if array is not None and not np.isfinite(array).all():
            raise ValueError(f"head {head}: {name} holds a number that is not finite")
    if index.members is None:
        return
    if (np.diff(index.cluster_of.astype(np.int64)) < 0).any():
        raise ValueError(f"head {head}: its keys are not in the order of their clusters")
    if (np.bincount(index.members, minlength=middle) != 1).any():
        raise ValueError(f"head {head}: members names a key twice")
