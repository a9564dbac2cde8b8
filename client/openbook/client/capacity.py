"""How many contexts fit: arithmetic on a model's shape, with nothing read or measured.

Knows: the bytes of keys and values. Does not know: channels or what a context really takes.
"""

from dataclasses import dataclass

from openbook.client.views import Model

NUMBER_BYTES = 2  # keys and values are counted at 16 bits
STORED_FACTOR = 1.3  # bytes stored, with the index, for one byte of keys and values: about


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of one context, and how many such contexts fit; None where no room was given.

    `kv_bytes` is exact, `stored_bytes` about right, and the counts are rounded down.
    """

    tokens: int
    kv_bytes: int
    stored_bytes: int
    fit_in_memory: int | None
    fit_on_disk: int | None


def stored_bytes(kv_bytes: int) -> int:
    """Return what a context takes on disk, index and all, for so many bytes of keys and values."""
    return round(STORED_FACTOR * kv_bytes)


def capacity(
    model: Model, tokens: int, *, memory_bytes: int | None = None, disk_bytes: int | None = None
) -> Capacity:
    """Return what contexts of `tokens` tokens take.

    A context in memory counts as its stored bytes: its files are mapped, and answers are quick
    where they stay in the page cache. Raises ValueError for tokens that the model has no positions
    for, and for a room below nothing.
    """
    for name, room in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
        if room is not None and room < 0:
            raise ValueError(f"{name} must not be negative, got {room}")
    if not 0 < tokens <= model.positions_max:
        raise ValueError(f"tokens is {tokens}; the model takes 1 to {model.positions_max}")
    kv_bytes = tokens * model.layers * model.kv_heads * model.head_dim * 2 * NUMBER_BYTES
    stored = stored_bytes(kv_bytes)
    return Capacity(
        tokens=tokens,
        kv_bytes=kv_bytes,
        stored_bytes=stored,
        fit_in_memory=None if memory_bytes is None else memory_bytes // stored,
        fit_on_disk=None if disk_bytes is None else disk_bytes // stored,
    )
