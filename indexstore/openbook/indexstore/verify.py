"""Checking a context that nobody needs to open: every byte, and answers that are known.

Owns the replay of the stored probe queries. The digests say that the bytes are those that were
sealed; the probes say that keys, values and scaling still give the attention that was computed
when they were written, on this machine, by this code.

One layer is mapped at a time, so a context larger than memory can be verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openbook.indexstore.attend import attend
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.errors import OperationCancelled, ShardCorrupt
from openbook.indexstore.head import EXACT, AttendRequest, LayerIndex
from openbook.indexstore.held import HeldContext, hold
from openbook.indexstore.layer import LayerRecords, layer_arrays
from openbook.indexstore.layout import TOKEN_KINDS
from openbook.indexstore.shard import Shard

# Float32 sums in the order of another vector width differ by some 1e-6; a key or value that is
# not the one that was written, by more than this.
PROBE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and the worst of the probes.

    `bytes_checked` are those of the shard files. `probes_checked` counts the probe queries of all
    query heads. `largest_error` is the largest difference of a probe's answer: of `out` as a part
    of the largest number in its head's values, of `lse` absolute, or relative where |lse| > 1.
    """

    records_checked: int
    bytes_checked: int
    probes_checked: int
    largest_error: float


def verify_context(
    path: Path, *, is_cancelled: Callable[[], bool] = lambda: False, threads: int = 1
) -> VerifyReport:
    """Read and digest all of the context at `path`, then answer its probe queries again.

    `is_cancelled` is asked before each MiB that is read and each layer's probes. The context
    cannot be deleted meanwhile. Raises OperationCancelled, ShardCorrupt naming the layer's file
    and the query head when an answer differs by more than PROBE_TOLERANCE, and what open_context
    raises.
    """

    def go_on(_: int = 0) -> None:
        if is_cancelled():
            raise OperationCancelled

    held = hold(path)
    try:
        held.check_sizes()
        tokens, *layers = held.manifest.files
        shard = held.shard(tokens, "full", go_on)
        for kind in TOKEN_KINDS:
            shard.read(kind, None, check_digest=True)
        records_checked, probes_checked, largest_error = len(TOKEN_KINDS), 0, 0.0
        for layer, file in enumerate(layers):
            shard = held.shard(file, "full", go_on)
            records = held.records(shard, "full")
            records_checked += sum(1 for _ in layer_arrays(records))
            go_on()
            error = _replay(held, layer, records, shard, threads=threads)
            largest_error = max(largest_error, error)
            probes_checked += records.probe_lse.size if records.heads else 0
            del records, shard  # unmapped before the next one is read
        return VerifyReport(
            records_checked, held.manifest.bytes_total, probes_checked, largest_error
        )
    finally:
        held.close()


def _replay(
    held: HeldContext, layer: int, records: LayerRecords, shard: Shard, *, threads: int
) -> float:
    """Answer the probes of one layer; return the largest error, or raise ShardCorrupt."""
    if not records.heads or not records.probe_lse.size:
        return 0.0
    manifest = held.manifest
    request = AttendRequest(
        layer=LayerIndex(records.heads, manifest.plan[layer]),
        queries=np.ascontiguousarray(records.probe_queries),
        scaling=manifest.scaling[layer],
        budget=EXACT,
    )
    (found,) = attend([request], threads=threads)
    shard.check()  # what was read from a page that is gone proves nothing
    group = manifest.query_heads // manifest.kv_heads
    # An average of values may be small by chance: what it is made of sets the scale.
    units = [float(np.abs(to_float32(index.values)).max()) or 1.0 for index in records.heads]
    largest = 0.0
    for head in range(manifest.query_heads):
        out, lse = records.probe_out[head], records.probe_lse[head]  # (p, dv), (p,)
        unit = units[head // group]
        errors = (
            np.abs(found.out[head] - out).max() / unit,
            (np.abs(found.lse[head] - lse) / np.maximum(1, np.abs(lse))).max(),
        )
        for name, error in zip(("out", "lse"), errors, strict=True):
            if not error <= PROBE_TOLERANCE:  # a NaN is not
                problem = f"query head {head}: {name} of a probe differs by {error:.3g}"
                raise ShardCorrupt(shard.entry.name, problem)
            largest = max(largest, float(error))
    return largest
