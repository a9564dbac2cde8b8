"""Claims about contexts that are open: loaded once, shared, refused when they do not fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openbook.indexstore.errors import FingerprintMismatch, IndexStoreError, ShardCorrupt
from openbook.worker.fingerprint import FingerprintFields
from openbook.worker.models import Model
from openbook.worker.opened import OpenContexts

Tiny = Callable[..., Model]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


FIELDS = [field.name for field in dataclasses.fields(FingerprintFields)]


@pytest.fixture
def contexts(tiny_model: Tiny) -> OpenContexts:
    return OpenContexts(tiny_model("llama", 9, 3), clock=time.monotonic)


def test_case_b42_eight_openers_load_a_cold_context_once(
    contexts: OpenContexts, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    path = read_context(tiny_model("llama", 9, 3), digits(700))
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: contexts.open(path, path.name), range(8)))
    assert contexts.loads == 1
    assert len({id(claim.window) for claim in claims}) == 1
    for claim in claims:
        assert contexts.open_count == 1
        claim.close()
        claim.close()
    assert contexts.open_count == 0


@pytest.mark.parametrize("part", FIELDS)
def test_a_context_made_with_another_part_of_the_model_is_refused_by_name(
    part: str, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("llama", 9, 3)
    path = read_context(model, digits(50))
    fields = ChangedFields(part, model.fingerprint_fields)
    other = dataclasses.replace(model, fingerprint_fields=fields)  # type: ignore[arg-type]
    contexts = OpenContexts(other, clock=time.monotonic)
    with pytest.raises(FingerprintMismatch) as caught:
        contexts.open(path, path.name)
    assert caught.value.field == part
    assert caught.value.expected != caught.value.found
    assert contexts.open_count == 0


class ChangedFields:
    """Fingerprint fields of which one is another as soon as they are those of a context."""

    def __init__(self, part: str, fields: FingerprintFields) -> None:
        self._part = part
        self._fields = fields

    def stored_as(self, *, prompt_layout: str, kv_dtype: str) -> FingerprintFields:
        """Return the fields of a context, but for the part."""
        fields = self._fields.stored_as(prompt_layout=prompt_layout, kv_dtype=kv_dtype)
        return dataclasses.replace(fields, **{self._part: "another"})


def test_a_context_of_another_model_or_id_is_refused(
    contexts: OpenContexts, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    path = read_context(tiny_model("llama", 4, 2), digits(50))
    with pytest.raises(FingerprintMismatch):
        contexts.open(path, path.name)
    own = read_context(tiny_model("llama", 9, 3), digits(50))
    with pytest.raises(FingerprintMismatch, match="context_id"):
        contexts.open(own, "another")
    with pytest.raises(IndexStoreError):
        contexts.open(own / "nothing", "here")
    assert contexts.open_count == 0


def test_a_failed_open_is_forgotten(
    contexts: OpenContexts, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    path = read_context(tiny_model("llama", 9, 3), digits(700))
    shard = path / "layer-001.mdb"
    shard.chmod(0o600)
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(ShardCorrupt):
            contexts.open(path, path.name)
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    contexts.open(path, path.name).close()
    assert contexts.loads == 1 and contexts.open_count == 0


def test_a_closed_claim_gives_nothing(
    contexts: OpenContexts, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    path = read_context(tiny_model("llama", 9, 3), digits(50))
    claim = contexts.open(path, path.name)
    other = claim.hold()
    claim.close()
    assert not claim.is_open and other.is_open and other.token_count == 50
    for use in (lambda: claim.window, lambda: claim.layers, claim.hold):
        with pytest.raises(ValueError, match="closed"):
            use()
    other.close()
