"""Claims about partials and their merge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.worker import reference
from openbook.worker.merge import (
    Partial,
    _attend_plain,
    attend_keys,
    causal_attention,
    empty_partial,
    merge,
)

CPU = torch.device("cpu")


def _qkv(seed: int, heads: tuple[int, int], rows: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads[0], rows, 16), (heads[1], keys, 16), (heads[1], keys, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_merge_equals_full_attention() -> None:
    q, k, v = _qkv(0, (9, 3), 5, 100)
    parts = [
        attend_keys(q, k[:, a:b], v[:, a:b], scaling=0.25) for a, b in ((0, 1), (1, 40), (40, 100))
    ]
    merged = merge(parts)
    out, lse = reference.attend(q.numpy(), k.numpy(), v.numpy(), scaling=0.25)
    np.testing.assert_allclose(merged.out.numpy(), out, atol=1e-5)
    np.testing.assert_allclose(merged.lse.numpy(), lse, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    cuts=st.lists(st.integers(0, 60), min_size=0, max_size=4),
    size=st.floats(0.1, 200.0),
)
def test_merge_of_any_cut_in_any_order_is_the_reference(
    seed: int, cuts: list[int], size: float
) -> None:
    q, k, v = _qkv(seed, (4, 2), 2, 60)
    bounds = [0, *sorted(cuts), 60]
    pairs = list(zip(bounds[:-1], bounds[1:], strict=True))
    parts = [attend_keys(q, k[:, a:b], v[:, a:b], scaling=size) for a, b in pairs]
    merged, backwards = merge(parts), merge(parts[::-1])
    assert not merged.out.isnan().any() and not merged.lse.isnan().any()
    out, lse = reference.merge([p.out.numpy() for p in parts], [p.lse.numpy() for p in parts])
    np.testing.assert_allclose(merged.out.numpy(), out, atol=2e-4)
    np.testing.assert_allclose(merged.lse.numpy(), lse, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(merged.out.numpy(), backwards.out.numpy(), atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_b05_an_empty_side_changes_no_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(9, 1, 64, generator=generator)
    out[0, 0, 0] = -0.0
    full = Partial(out.to(dtype), torch.randn(9, 1, generator=generator).mul(30).to(dtype))
    empty = empty_partial((9, 1), 64, CPU)
    for merged in (merge([full, empty]), merge([empty, full]), merge([empty, full, empty])):
        assert torch.equal(merged.out.view(torch.int32), full.out.float().view(torch.int32))
        assert torch.equal(merged.lse.view(torch.int32), full.lse.float().view(torch.int32))


def test_case_b05_two_empties_are_zeros_and_minus_infinity() -> None:
    empty = empty_partial((9, 3), 64, CPU)
    merged = merge([empty, empty, empty])
    assert torch.equal(merged.out, torch.zeros(9, 3, 64))
    assert torch.equal(merged.lse, torch.full((9, 3), -torch.inf))


def test_case_b05_emptiness_is_per_head() -> None:
    q, k, v = _qkv(2, (4, 2), 1, 7)
    a = attend_keys(q, k, v, scaling=1.0)
    lse = a.lse.clone()
    lse[1] = -torch.inf
    out = a.out.clone()
    out[1] = 0
    merged = merge([Partial(out, lse), a])
    assert torch.equal(merged.out[1], a.out[1]) and torch.equal(merged.lse[1], a.lse[1])
    assert torch.allclose(merged.lse[0], a.lse[0] + np.log(2.0))


def test_merge_survives_scores_that_overflow_exp() -> None:
    one = Partial(torch.ones(1, 1, 2), torch.tensor([[3e4]]))
    two = Partial(torch.zeros(1, 1, 2), torch.tensor([[-3e4]]))
    merged = merge([two, one])
    assert torch.equal(merged.out, one.out) and torch.equal(merged.lse, one.lse)


def test_merge_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge([])


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_and_plain_partials_agree(is_causal: bool) -> None:
    q, k, v = _qkv(3, (12, 4), 33, 33)
    fused = attend_keys(q, k, v, scaling=0.3, is_causal=is_causal)
    plain = _attend_plain(q, k, v, scaling=0.3, is_causal=is_causal)
    out, lse = reference.attend(
        q.numpy(), k.numpy(), v.numpy(), scaling=0.3, past=0 if is_causal else None
    )
    for part in (fused, plain):
        np.testing.assert_allclose(part.out.numpy(), out, atol=1e-5)
        np.testing.assert_allclose(part.lse.numpy(), lse, atol=1e-5)


def test_causal_block_needs_square_shapes() -> None:
    q, k, v = _qkv(4, (2, 2), 3, 4)
    with pytest.raises(ValueError, match="3 and 4"):
        attend_keys(q, k, v, scaling=1.0, is_causal=True)


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (28, 4), (12, 12)])
def test_case_b10_query_head_reads_kv_head_of_its_group(heads: tuple[int, int]) -> None:
    q, k, v = _qkv(5, heads, 6, 6)
    v[:] = torch.arange(heads[1]).view(-1, 1, 1)
    want = (torch.arange(heads[0]) // (heads[0] // heads[1])).float()
    got = attend_keys(q, k, v, scaling=1.0).out
    causal = attend_keys(q, k, v, scaling=1.0, is_causal=True).out
    whole = causal_attention(q[None], k[None], v[None], scaling=1.0)[0]
    for out in (got, causal, whole):
        assert torch.allclose(out, want.view(-1, 1, 1).expand_as(out), atol=1e-5)


def test_causal_attention_takes_narrower_values() -> None:
    q, k, v = _qkv(6, (4, 2), 9, 9)
    out = causal_attention(q[None], k[None], v[None, ..., :8], scaling=0.5)[0]
    want, _ = reference.attend(q.numpy(), k.numpy(), v[..., :8].numpy(), scaling=0.5, past=0)
    np.testing.assert_allclose(out.numpy(), want, atol=1e-5)
