"""How much memory an ingest takes, how much is left, and what the C library is told about both.

Owns the estimate of an ingest's peak, the look at the system's and the control group's limits, and
the calls to glibc. Where there is no Linux or another C library, nothing is known and nothing done.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openbook.indexstore.build import IndexParams
from openbook.indexstore.head import KvDtype
from openbook.worker.capture import NEIGHBOURS, TILE_BYTES_MAX, sample_positions
from openbook.worker.errors import MemoryShort
from openbook.worker.models import Model

FIXED_BYTES = TILE_BYTES_MAX + (32 << 20)  # of any length: tiles of scores, LMDB, heaps of threads
LeftBytes = Callable[[torch.device], int | None]

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_LARGE_BLOCK_BYTES = 1 << 20  # a page fault costs less than a copy; below it nothing changes
_STORED_BYTES: dict[KvDtype, int] = {"float16": 2, "bfloat16": 2, "float32": 4}


def refuse_without_room(
    model: Model,
    tokens: int,
    *,
    kv_dtype: KvDtype,
    params: IndexParams,
    has_graph: bool,
    threads: int,
    left_bytes: LeftBytes,
) -> None:
    """Refuse a document of `tokens` tokens that cannot be read in the memory that is left.

    Raises MemoryShort with what it takes and what there is. Memory of which nothing is known
    is enough.
    """
    host = torch.device("cpu")

    def needed(device: torch.device, count: int) -> int:
        index = index_bytes(
            model, count, kv_dtype=kv_dtype, params=params, has_graph=has_graph, threads=threads
        )
        if model.device != host:
            return FIXED_BYTES + (index if device == host else forward_bytes(model, count))
        return FIXED_BYTES + max(forward_bytes(model, count), held_bytes(model, count) + index)

    for device in {model.device, host}:
        needs, left = needed(device, tokens), left_bytes(device)
        if left is not None and needs > left:
            limit = bisect_right(range(1, tokens), left, key=partial(needed, device))
            raise MemoryShort(tokens, limit, needs, left)


def forward_bytes(model: Model, tokens: int) -> int:
    """Return the most that one forward without a cache holds in activations, beside the weights.

    The widest moment of a gated decoder layer: three arrays as wide as its widest projection, the
    rotation of its queries, or a norm in float32.
    """
    shape, hidden, item = model.shape, _hidden_size(model), model.module.dtype.itemsize
    linears = (module for module in model.base.modules() if isinstance(module, nn.Linear))
    widest = max((linear.out_features for linear in linears), default=hidden)
    q = shape.query_heads * shape.head_dim
    kv = shape.kv_heads * (shape.head_dim + shape.value_dim)
    moments = (3 * widest + 3 * hidden, 5 * q + 2 * kv + 2 * hidden)
    norm = 2 * hidden * item + 3 * hidden * 4
    return tokens * max(norm, *(moment * item for moment in moments))


def held_bytes(model: Model, tokens: int) -> int:
    """Return what a forward holds while it hands a layer on: its input, q, k, v and the output."""
    shape = model.shape
    q = shape.query_heads * shape.head_dim
    kv = shape.kv_heads * (shape.head_dim + shape.value_dim)
    return tokens * model.module.dtype.itemsize * (2 * _hidden_size(model) + 2 * q + kv)


def index_bytes(
    model: Model,
    tokens: int,
    *,
    kv_dtype: KvDtype,
    params: IndexParams,
    has_graph: bool,
    threads: int,
) -> int:
    """Return the most bytes that indexing a layer takes: heads, and what `threads` build at once.

    Keys and values are there twice, as the layer and as its heads; a head being built has them in
    float32 as well, with the points of its clusters, what they differ in and that once more,
    turned; for a graph with three tables as wide as it.
    """
    shape = model.shape
    d, dv, stored = shape.head_dim, shape.value_dim, _STORED_BYTES[kv_dtype]
    per_cluster = (4 * (d + dv) + 16) / params.keys_per_cluster
    head = 2 * stored * (d + dv) + d // 4 + per_cluster + 8  # codes: d // 4; two ids a key: 8
    building = 4 * (3 * d + dv) + 12 * max(d, dv)  # float32: as said above, at most three at once
    queries = len(sample_positions(tokens)) * shape.query_heads * 8 * d
    if has_graph:
        head += d + 4 * params.degree
        building += 12 * params.degree
        queries += len(sample_positions(tokens)) * shape.query_heads * 4 * NEIGHBOURS
    rows = shape.kv_heads * head + min(threads, shape.kv_heads) * building
    return int(tokens * rows) + queries


def left_bytes(device: torch.device) -> int | None:
    """Return how much memory this process may still take on a device; None if nobody tells."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return host_left_bytes()


def host_left_bytes(root: Path = Path("/")) -> int | None:
    """Return what the system has available, or less where a control group (v1, v2) allows less.

    Cached files count as free: they give way. None where /proc tells nothing.
    """
    found = list(_group_left(root))
    with suppress(OSError, KeyError, ValueError):
        found.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(0, min(found)) if found else None


def unmap_large_blocks() -> None:
    """Have the C library (glibc) give each large block back to the system when it is freed.

    By default its threshold grows with what it sees, and the activations and tiles of every layer
    leave holes that stay part of the peak. The promise is a peak near that of a bare forward.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def return_free_memory() -> None:
    """Give the freed small blocks of a layer's build back to the system as well (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _hidden_size(model: Model) -> int:
    config: Any = model.base.config
    return int(config.hidden_size)


def _group_left(root: Path) -> Iterator[int]:
    """Yield what each control group above this process, itself included, leaves to it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = top / path.lstrip("/")
        # In a container the path may be one of the host's; the group itself is then at the top.
        for directory in (group, *group.parents):
            with suppress(OSError, KeyError, ValueError):  # no limit, or "max": not a number
                stat = _fields(directory / "memory.stat")
                limit, used = (int((directory / name).read_text()) for name in names[:2])
                yield limit - used + stat[names[2]] + stat[names[3]]
            if directory == top:
                break


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
