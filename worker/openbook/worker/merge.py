"""Attention over a set of keys as a partial, and how partials of disjoint sets join.

Owns Partial, merge and the one way a partial is computed on the device. It knows nothing of where
keys come from: a window, a tail and a middle are the same to it.

For a set S and scores z = q·k·scaling: lse = ln Σ exp(z), out = Σ exp(z - lse) v. Natural log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of some queries over one set of keys.

    `out` float32 (query heads, rows, dv); `lse` float32 (query heads, rows), natural log. An empty
    set has `out` zeros and `lse` -inf.
    """

    out: Tensor
    lse: Tensor


def empty_partial(lse_shape: tuple[int, ...], value_dim: int, device: torch.device) -> Partial:
    """Return the partial of no keys at all: the identity of `merge`."""
    out = torch.zeros((*lse_shape, value_dim), dtype=torch.float32, device=device)
    return Partial(out, torch.full(lse_shape, -torch.inf, dtype=torch.float32, device=device))


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partials of sets that share no key into the partial of all their keys.

    Nothing is lost but rounding, in whatever order they come. An empty set changes no bit of the
    other; two empty sets give zeros and -inf, never NaN. Raises ValueError when `partials` is
    empty. Source: arXiv 2409.10516, appendix B.
    """
    if not partials:
        raise ValueError("merge needs at least one partial, got none")
    if len(partials) == 1:
        return Partial(partials[0].out.float(), partials[0].lse.float())
    lses = torch.stack([partial.lse for partial in partials]).float()  # (partials, heads, rows)
    is_empty = torch.isneginf(lses)
    if bool(is_empty.any()):
        return _merge_some_empty(partials)
    outs = torch.stack([partial.out for partial in partials]).float()
    lse = torch.logsumexp(lses, dim=0)
    return Partial((outs * torch.exp(lses - lse).unsqueeze(-1)).sum(dim=0), lse)


def _merge_some_empty(partials: Sequence[Partial]) -> Partial:
    """Merge one by one, some heads or rows of some partials being empty."""
    first, *others = partials
    merged = Partial(first.out.float(), first.lse.float())
    for other in others:
        out, other_lse = other.out.float(), other.lse.float()
        lse = torch.logaddexp(merged.lse, other_lse)
        # exp(-inf - -inf) would be NaN; with a finite number in its place both weights are 0.
        common = lse.clamp_min(torch.finfo(torch.float32).min)
        mixed = merged.out * torch.exp(merged.lse - common).unsqueeze(-1)
        mixed += out * torch.exp(other_lse - common).unsqueeze(-1)
        # x·1 + 0 is x but for the sign of a zero; an empty side must not change one bit.
        mixed = torch.where(torch.isneginf(other_lse).unsqueeze(-1), merged.out, mixed)
        merged = Partial(torch.where(torch.isneginf(merged.lse).unsqueeze(-1), out, mixed), lse)
    return merged


def attend_keys(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float, is_causal: bool = False
) -> Partial:
    """Compute the partial of queries over keys that lie on the same device.

    q (query heads, rows, d), k (KV heads, keys, d), v (KV heads, keys, dv), un-repeated: query head
    h reads KV head h // group. `is_causal` needs as many rows as keys: row i sees keys 0..i.
    """
    query_heads, rows, _ = q.shape
    kv_heads, keys, value_dim = v.shape
    if keys == 0:
        return empty_partial((query_heads, rows), value_dim, q.device)
    if is_causal and rows != keys:
        raise ValueError(f"a causal block needs as many rows as keys, got {rows} and {keys}")
    group = query_heads // kv_heads
    if q.device.type == "cpu" and q.dtype == k.dtype and q.shape[-1] == value_dim:
        if is_causal:
            packed = q.unsqueeze(0)
        else:  # one KV head's query heads are rows of one block: each key is read once for all
            packed = q.reshape(1, kv_heads, group * rows, -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            packed, k.unsqueeze(0), v.unsqueeze(0), 0.0, is_causal, scale=scaling
        )
        return Partial(
            out.reshape(query_heads, rows, value_dim).float(),
            lse.reshape(query_heads, rows).float(),
        )
    return _attend_plain(q, k, v, scaling=scaling, is_causal=is_causal)


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, is_causal: bool) -> Partial:
    """Compute the same by plain matrix products, in float32, on any device."""
    query_heads, rows, head_dim = q.shape
    kv_heads, keys, value_dim = v.shape
    group = query_heads // kv_heads
    packed = q.float().reshape(kv_heads, group * rows, head_dim)
    scores = torch.bmm(packed, k.float().transpose(1, 2)).mul_(scaling)  # (kv, group·rows, keys)
    scores = scores.view(kv_heads, group, rows, keys)
    if is_causal:
        future = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # (kv, group, rows)
    weights = torch.exp(scores - lse.unsqueeze(-1)).view(kv_heads, group * rows, keys)
    out = torch.bmm(weights, v.float())
    return Partial(out.view(query_heads, rows, value_dim), lse.view(query_heads, rows))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
    """Attend causally over a whole document and return (1, query heads, tokens, dv) in q's dtype.

    q (1, query heads, tokens, d), k and v (1, KV heads, tokens, ...), un-repeated. Never makes a
    (tokens, tokens) array: the fused kernels are asked for what each of them can do.
    """
    value_dim = v.shape[-1]
    if value_dim < q.shape[-1]:  # the fused kernels want equal sizes; zeros add nothing
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    is_shared = q.shape[1] != k.shape[1]
    if is_shared and q.device.type == "cuda" and q.dtype == torch.float32:
        # CUDA's only fused float32 kernel takes no groups; one layer repeated is what it costs.
        group = q.shape[1] // k.shape[1]
        k, v, is_shared = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scaling, enable_gqa=is_shared
    )
    return out[..., :value_dim]
