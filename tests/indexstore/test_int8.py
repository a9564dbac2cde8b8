"""Every way to score int8 keys gives the same integers, those of the plain product."""

from __future__ import annotations

import numpy as np
import pytest

from openbook.indexstore import _search

WIDTHS = (1, 7, 16, 24, 32, 48, 64, 80, 96, 128, 160, 256, 512, 528, 1024)
LEVELS = ("portable", "avx2", "avx512")


def limit(d: int) -> int:
    """The largest number of a quantised query, as the search has it."""
    return min(32767, 2147483647 // (128 * d))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("d", WIDTHS)
def test_scores_equal_the_plain_product(level: str, d: int) -> None:
    if level not in _search.levels():
        pytest.skip(f"this processor has no {level}")
    rng = np.random.default_rng(d)
    for group in (1, 2, 3, 7, 8, 9, 17):
        for count in (0, 1, 5, 8, 9, 31, 64):
            keys = rng.integers(-128, 128, (200, d)).astype(np.int8)
            queries = rng.integers(-limit(d), limit(d) + 1, (group, d)).astype(np.int16)
            if count == 8:  # the largest sums there can be
                keys[:100], keys[100:] = 127, -127
                queries[:] = limit(d)
            ids = rng.integers(0, len(keys), count).astype(np.uint32)
            scores = _search.score_int8(queries, keys, ids, level)
            plain = queries.astype(np.int64) @ keys[ids].astype(np.int64).T
            np.testing.assert_array_equal(scores, plain)


def test_keys_of_a_read_only_file_are_scored_to_their_last_byte(tmp_path) -> None:
    """The last key ends where the file does: nothing after it is touched."""
    d = 64
    rng = np.random.default_rng(0)
    keys = rng.integers(-127, 128, (4096 // d, d)).astype(np.int8)
    (tmp_path / "keys").write_bytes(keys.tobytes())
    mapped = np.memmap(tmp_path / "keys", np.int8, "r", shape=keys.shape)
    queries = rng.integers(-100, 100, (3, d)).astype(np.int16)
    ids = np.arange(len(keys), dtype=np.uint32)
    for level in _search.levels():
        plain = queries.astype(np.int64) @ keys.astype(np.int64).T
        np.testing.assert_array_equal(_search.score_int8(queries, mapped, ids, level), plain)
