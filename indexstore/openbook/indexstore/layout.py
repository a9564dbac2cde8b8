"""The bytes of one record, drawn once.

Owns the record header, the kinds of records with their shapes and dtypes, and the sizes that
follow from them. It knows nothing of LMDB transactions (shard.py), of digests (manifest.py) or
of directories (store.py). All numbers are little-endian.

A record is one LMDB value: a header of 48 bytes, the payload in C order, zeros up to RECORD_MIN.

    offset  bytes  field
         0      4  magic, "OBRC"
         4      2  format version
         6      1  kind       (Kind)
         7      1  dtype      (DTYPES)
         8      2  layer      0xFFFF for none (tokens, offsets)
        10      2  KV head    0xFFFF for none (one record for the whole layer)
        12      1  dimensions, 0 to 3
        13      3  zero
        16     24  shape, three u64; unused ones are zero
        40      8  payload bytes, u64 = product of the shape times the size of the dtype
        48      …  payload, then zeros

LMDB puts a value that does not fit half a page on pages of its own, after a page header of 16
bytes. Mapped pages are page-aligned, so the value starts at 16 mod 64 and the payload, 48 bytes
further, at 0 mod 64: a cache line, and what the widest vector loads like.

    page   0        16              64
           | header | record header | payload ...          (one or more pages, contiguous)

RECORD_MIN makes every record such a value. It fills one page of 4 KiB to its last byte.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 2  # what this code writes
FORMAT_OLDEST = 1  # what this code still reads

MAGIC = b"OBRC"
HEADER = struct.Struct("<4sHBBHHB3s3QQ")
HEADER_BYTES = 48
NONE_U16 = 0xFFFF
DIMENSIONS_MAX = 3
PAGE_BYTES = 4096  # LMDB takes the system's page size; larger pages only cost padding or a copy
PAGE_HEADER_BYTES = 16  # LMDB 0.9, 64-bit; lib_version=1 has 24, which would break the alignment
RECORD_MIN = PAGE_BYTES - PAGE_HEADER_BYTES
RECORD_MAX = 0xFFFFFFFF  # LMDB's MAXDATASIZE
ALIGNMENT = 64


class Kind(enum.IntEnum):
    """What a record holds; the number is the byte in its header, for ever."""

    KEYS = 1
    VALUES = 2
    KEYS_INT8 = 3
    CENTRE = 4
    SCALE = 5
    GRAPH = 6
    ENTRIES = 7
    CENTROIDS = 8
    COUNTS = 9
    VALUE_SUMS = 10
    CLUSTER_OF = 11
    SPREADS = 12
    MEMBERS = 13
    CODES = 14
    CODEBOOK = 15
    CODE_BASIS = 16
    CODE_SPREADS = 17
    WINDOW_KEYS = 32
    WINDOW_VALUES = 33
    TRAIN_QUERIES = 34
    TRAIN_POSITIONS = 35
    PROBE_QUERIES = 36
    PROBE_OUT = 37
    PROBE_LSE = 38
    TOKENS = 64
    OFFSETS = 65

    @property
    def label(self) -> str:
        """The name used in LMDB keys, in the manifest and for the arrays in memory."""
        return self.name.lower()


KIND_OF_LABEL = {kind.label: kind for kind in Kind}
HEAD_KINDS = tuple(kind for kind in Kind if kind < Kind.WINDOW_KEYS)
GRAPH_KINDS = (Kind.KEYS_INT8, Kind.CENTRE, Kind.SCALE, Kind.GRAPH, Kind.ENTRIES)
CODE_KINDS = (Kind.MEMBERS, Kind.CODES, Kind.CODEBOOK, Kind.CODE_BASIS, Kind.CODE_SPREADS)
LAYER_KINDS = tuple(kind for kind in Kind if Kind.WINDOW_KEYS <= kind < Kind.TOKENS)
TOKEN_KINDS = (Kind.TOKENS, Kind.OFFSETS)

# name: (byte in the header, NumPy's type). bfloat16 travels as its 16 bits.
DTYPES: Mapping[str, tuple[int, np.dtype[Any]]] = {
    "float32": (1, np.dtype("<f4")),
    "float16": (2, np.dtype("<f2")),
    "bfloat16": (3, np.dtype("<u2")),
    "int8": (4, np.dtype("i1")),
    "uint32": (5, np.dtype("<u4")),
    "int32": (6, np.dtype("<i4")),
    "uint8": (7, np.dtype("u1")),
}
_DTYPE_OF_CODE = {code: name for name, (code, _) in DTYPES.items()}
_DTYPE_OF_NUMPY = {dtype: name for name, (_, dtype) in DTYPES.items()}

KV_DTYPES = ("float16", "bfloat16", "float32")

# The shape of each kind by symbols. m middle tokens, d head_dim, v value_dim, kv KV heads,
# q query heads, w window tokens, n tokens; per head: degree, e entries, c clusters; per layer:
# s training queries, p probe queries; of the codes: blocks of 16 keys, rows of a block, pairs of
# channels.
SHAPES: Mapping[Kind, tuple[str, ...]] = {
    Kind.KEYS: ("m", "d"),
    Kind.VALUES: ("m", "v"),
    Kind.KEYS_INT8: ("m", "d"),
    Kind.CENTRE: ("d",),
    Kind.SCALE: ("d",),
    Kind.GRAPH: ("m", "degree"),
    Kind.ENTRIES: ("e",),
    Kind.CENTROIDS: ("c", "d"),
    Kind.COUNTS: ("c",),
    Kind.VALUE_SUMS: ("c", "v"),
    Kind.CLUSTER_OF: ("m",),
    Kind.SPREADS: ("c",),
    Kind.MEMBERS: ("m",),
    Kind.CODES: ("blocks", "rows", "row"),
    Kind.CODEBOOK: ("pairs", "codewords", "pair"),
    Kind.CODE_BASIS: ("directions", "d"),
    Kind.CODE_SPREADS: ("directions",),
    Kind.WINDOW_KEYS: ("kv", "w", "d"),
    Kind.WINDOW_VALUES: ("kv", "w", "v"),
    Kind.TRAIN_QUERIES: ("kv", "s", "d"),
    Kind.TRAIN_POSITIONS: ("kv", "s"),
    Kind.PROBE_QUERIES: ("q", "p", "d"),
    Kind.PROBE_OUT: ("q", "p", "v"),
    Kind.PROBE_LSE: ("q", "p"),
    Kind.TOKENS: ("n",),
    Kind.OFFSETS: ("n", "pair"),
}
_OF_ONE_HEAD = ("degree", "e", "c")

_ALLOWED_DTYPES: Mapping[Kind, tuple[str, ...]] = {
    Kind.KEYS: KV_DTYPES,
    Kind.VALUES: KV_DTYPES,
    Kind.KEYS_INT8: ("int8",),
    Kind.GRAPH: ("uint32",),
    Kind.ENTRIES: ("uint32",),
    Kind.COUNTS: ("uint32",),
    Kind.CLUSTER_OF: ("uint32",),
    Kind.CENTROIDS: ("float16", "float32"),
    Kind.VALUE_SUMS: ("float16", "float32"),
    Kind.MEMBERS: ("uint32",),
    Kind.CODES: ("uint8",),
    Kind.WINDOW_KEYS: KV_DTYPES,
    Kind.WINDOW_VALUES: KV_DTYPES,
    Kind.TRAIN_QUERIES: ("float16", "float32"),
    Kind.TRAIN_POSITIONS: ("int32",),
    Kind.TOKENS: ("int32",),
    Kind.OFFSETS: ("int32",),
}
_KV_KINDS = (Kind.KEYS, Kind.VALUES, Kind.WINDOW_KEYS, Kind.WINDOW_VALUES)


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a record's header says: where it belongs and what its payload is."""

    kind: Kind
    layer: int | None
    head: int | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1].itemsize

    @property
    def record_bytes(self) -> int:
        """The size of the LMDB value: header, payload and padding."""
        return max(RECORD_MIN, HEADER_BYTES + self.payload_bytes)

    @property
    def key(self) -> bytes:
        """The LMDB key: the label, and the head in three or more digits where there is one."""
        return (self.kind.label + ("" if self.head is None else f"/{self.head:03d}")).encode()


def info_of(
    kind: Kind, array: NDArray[Any], *, layer: int | None, head: int | None = None
) -> RecordInfo:
    """Describe `array` as a record.

    Raises ValueError for a dtype the store does not keep, and for more than 4 GiB in one record.
    """
    name = _DTYPE_OF_NUMPY.get(array.dtype)
    if name is None:
        raise ValueError(f"{kind.label}: dtype {array.dtype} is not one of {', '.join(DTYPES)}")
    info = RecordInfo(kind, layer, head, name, tuple(int(size) for size in array.shape))
    if info.record_bytes > RECORD_MAX:
        raise ValueError(f"{kind.label}: {info.payload_bytes} bytes do not fit one record")
    return info


def pack_record(info: RecordInfo, array: NDArray[Any]) -> bytearray:
    """Return the LMDB value of `array`: header, payload, zeros. Bits are copied, not converted."""
    value = bytearray(info.record_bytes)
    shape = info.shape + (0,) * (DIMENSIONS_MAX - len(info.shape))
    code, dtype = DTYPES[info.dtype]
    layer = NONE_U16 if info.layer is None else info.layer
    head = NONE_U16 if info.head is None else info.head
    HEADER.pack_into(
        value, 0, MAGIC, FORMAT_VERSION, info.kind, code, layer, head, len(info.shape),
        bytes(3), *shape, info.payload_bytes,
    )  # fmt: skip
    if info.payload_bytes:
        payload = np.frombuffer(value, dtype, math.prod(info.shape), HEADER_BYTES)
        np.copyto(payload.reshape(info.shape), array)
    return value


def unpack_header(value: memoryview) -> RecordInfo:
    """Read a record's header and check every field of it, trusting none.

    Raises ValueError saying which field is out of range.
    """
    if len(value) < RECORD_MIN:
        raise ValueError(f"a record of {len(value)} bytes, shorter than {RECORD_MIN}")
    magic, version, kind, dtype, layer, head, ndim, zero, *rest = HEADER.unpack_from(value)
    *shape, payload_bytes = rest
    if magic != MAGIC:
        raise ValueError("no record magic")
    if not FORMAT_OLDEST <= version <= FORMAT_VERSION:
        raise ValueError(f"record format {version}")
    if kind not in Kind.__members__.values():
        raise ValueError(f"record kind {kind}")
    if dtype not in _DTYPE_OF_CODE:
        raise ValueError(f"record dtype {dtype}")
    if ndim > DIMENSIONS_MAX or any(shape[ndim:]) or any(zero):
        raise ValueError(f"record of {ndim} dimensions, shape {shape}")
    info = RecordInfo(
        kind=Kind(kind),
        layer=None if layer == NONE_U16 else layer,
        head=None if head == NONE_U16 else head,
        dtype=_DTYPE_OF_CODE[dtype],
        shape=tuple(shape[:ndim]),
    )
    if payload_bytes != info.payload_bytes or len(value) != info.record_bytes:
        raise ValueError(
            f"record of {len(value)} bytes, payload {payload_bytes}, shape {info.shape}"
        )
    return info


def check_shapes(
    records: Iterable[RecordInfo], known: Mapping[str, int], *, kv_dtype: str | None = None
) -> None:
    """Check the records of one file against each other and against the sizes already known.

    `known` maps symbols of SHAPES to sizes; a symbol not in it takes the first size it meets.
    Raises ValueError naming the record, the symbol and both sizes.
    """
    sizes = dict(known)
    of_head: dict[int | None, dict[str, int]] = {}
    for info in records:
        symbols = SHAPES[info.kind]
        where = info.key.decode()
        if len(info.shape) != len(symbols):
            raise ValueError(f"{where}: shape {info.shape}, expected ({', '.join(symbols)})")
        for symbol, size in zip(symbols, info.shape, strict=True):
            scope = of_head.setdefault(info.head, {}) if symbol in _OF_ONE_HEAD else sizes
            if scope.setdefault(symbol, size) != size:
                raise ValueError(f"{where}: {symbol} is {size}, expected {scope[symbol]}")
        if info.dtype not in _ALLOWED_DTYPES.get(info.kind, ("float32",)):
            raise ValueError(f"{where}: dtype {info.dtype}")
        if info.kind in _KV_KINDS:
            kv_dtype = kv_dtype or info.dtype
            if info.dtype != kv_dtype:
                raise ValueError(f"{where}: dtype {info.dtype}, expected {kv_dtype}")
    for head, scope in of_head.items():
        if "e" in scope and scope["e"] != scope.get("c", 0) + 1:
            raise ValueError(f"head {head}: {scope['e']} entries for {scope.get('c')} clusters")


def code_sizes(middle: int, head_dim: int) -> dict[str, int]:
    """Return what the symbols of the codes' shapes come to for m keys of d channels."""
    pairs = -(-head_dim // 2)
    return {
        "blocks": -(-middle // 16),
        "rows": -(-pairs // 4),
        "row": 32,
        "pairs": pairs,
        "codewords": 16,
        "pair": 2,
        "directions": 2 * pairs,
    }


def map_bytes(records: Iterable[RecordInfo]) -> int:
    """Return an LMDB map size that these records, committed one by one, cannot outgrow.

    Each record takes its own pages. Each commit copies the path to its leaf and notes the pages
    it freed, which later commits reuse: 16 pages a commit bounds both. Only address space is
    reserved by it, never disk.
    """
    pages = sum(-(-(PAGE_HEADER_BYTES + i.record_bytes) // PAGE_BYTES) + 16 for i in records)
    return (pages + 256) * PAGE_BYTES
