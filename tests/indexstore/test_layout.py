"""A record's bytes are as drawn, and no header is believed."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openbook.indexstore.layout import (
    DTYPES,
    FORMAT_OLDEST,
    FORMAT_VERSION,
    HEADER,
    HEADER_BYTES,
    RECORD_MIN,
    SHAPES,
    Kind,
    RecordInfo,
    check_shapes,
    info_of,
    pack_record,
    unpack_header,
)

KEYS = RecordInfo(Kind.KEYS, 3, 1, "float16", (100, 64))


def packed(info: RecordInfo) -> bytearray:
    return pack_record(info, np.zeros(info.shape, DTYPES[info.dtype][1]))


def test_header_is_drawn_right() -> None:
    value = packed(KEYS)
    assert HEADER.size == HEADER_BYTES == 48
    assert value[:4] == b"OBRC"
    assert struct.unpack_from("<HBBHH", value, 4) == (FORMAT_VERSION, 1, 2, 3, 1)
    assert value[12] == 2 and value[13:16] == bytes(3)
    assert struct.unpack_from("<4Q", value, 16) == (100, 64, 0, 12_800)


def test_small_record_is_padded_with_zeros_to_a_page() -> None:
    value = pack_record(RecordInfo(Kind.SCALE, 0, 0, "float32", (4,)), np.ones(4, np.float32))
    assert len(value) == RECORD_MIN == 4096 - 16
    assert value[HEADER_BYTES : HEADER_BYTES + 16] == np.ones(4, np.float32).tobytes()
    assert not any(value[HEADER_BYTES + 16 :])


@given(
    kind=st.sampled_from(Kind),
    layer=st.none() | st.integers(0, 9999),
    head=st.none() | st.integers(0, 4095),
    dtype=st.sampled_from(list(DTYPES)),
    shape=st.lists(st.integers(0, 30), max_size=3).map(tuple),
)
@example(kind=Kind.PROBE_LSE, layer=0, head=None, dtype="float32", shape=(4, 0))
def test_header_reads_back_as_written(kind: Any, layer: Any, head: Any, dtype: Any, shape: Any):
    info = RecordInfo(kind, layer, head, dtype, shape)
    assert unpack_header(memoryview(packed(info))) == info


@given(st.binary(min_size=RECORD_MIN, max_size=RECORD_MIN))
def test_random_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(ValueError, match="magic"):
        unpack_header(memoryview(b"XXXX" + raw[4:]))


@given(st.integers(4, HEADER_BYTES - 1), st.integers(1, 255))
def test_changed_header_is_refused_or_another_record(position: int, flip: int) -> None:
    value = packed(KEYS)
    value[position] ^= flip
    try:
        found = unpack_header(memoryview(value))
    except ValueError:
        return
    # The only silent changes are the labels, which the reader compares with the manifest's, and
    # another version that is read, which the record's digest is for.
    version = struct.unpack_from("<H", value, 4)[0]
    assert found != KEYS or FORMAT_OLDEST <= version < FORMAT_VERSION
    assert found.payload_bytes + HEADER_BYTES <= len(value)


@pytest.mark.parametrize(
    ("offset", "layout", "number", "problem"),
    [
        (4, "<H", FORMAT_VERSION + 1, "format"),
        (6, "<B", 0, "kind"),
        (6, "<B", 255, "kind"),
        (7, "<B", 0, "dtype"),
        (7, "<B", 200, "dtype"),
        (12, "<B", 4, "dimensions"),
        (12, "<B", 1, "dimensions"),
        (16, "<Q", 2**63, "payload"),
        (16, "<Q", 2**64 - 1, "payload"),
        (24, "<Q", 2**61, "payload"),
        (40, "<Q", 2**64 - 1, "payload"),
        (40, "<Q", 0, "payload"),
    ],
)
def test_hostile_header_names_its_field(offset: int, layout: str, number: int, problem: str):
    value = packed(KEYS)
    struct.pack_into(layout, value, offset, number)
    with pytest.raises(ValueError, match=problem):
        unpack_header(memoryview(value))


def test_short_value_is_no_record() -> None:
    with pytest.raises(ValueError, match="47 bytes"):
        unpack_header(memoryview(packed(KEYS))[:47])


def test_every_kind_has_a_shape() -> None:
    assert set(SHAPES) == set(Kind)


def test_unkept_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float64"):
        info_of(Kind.KEYS, np.zeros((1, 1)), layer=0, head=0)


def test_big_endian_is_not_taken_for_little() -> None:
    with pytest.raises(ValueError, match=">f4"):
        info_of(Kind.KEYS, np.zeros((1, 1), ">f4"), layer=0, head=0)


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([RecordInfo(Kind.KEYS, 0, 0, "float16", (10,))], "shape"),
        ([RecordInfo(Kind.KEYS, 0, 0, "float16", (11, 4))], "m is 11, expected 10"),
        ([RecordInfo(Kind.KEYS, 0, 0, "int8", (10, 4))], "dtype int8"),
        ([RecordInfo(Kind.KEYS, 0, 0, "bfloat16", (10, 4))], "expected float16"),
        ([RecordInfo(Kind.CENTRE, 0, 0, "float16", (4,))], "dtype float16"),
        (
            [
                RecordInfo(Kind.ENTRIES, 0, 0, "uint32", (3,)),
                RecordInfo(Kind.COUNTS, 0, 0, "uint32", (3,)),
            ],
            "3 entries for 3 clusters",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(records: list[RecordInfo], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_shapes(records, {"m": 10, "d": 4}, kv_dtype="float16")
