"""From a document to a sealed draft: tokens, one forward, an index per head, files.

Owns the order of the stages, the choice of the stored number type and the seconds of each stage.
At most one layer of the context is in memory beside the model and its activations: a layer is
indexed and written inside its own attention call. It knows nothing of tenants, queues or where a
context is published.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.indexstore.build import IndexParams
from openbook.indexstore.dtypes import fits, to_stored
from openbook.indexstore.head import KvDtype, PlanKind, Stored
from openbook.indexstore.lift import lift_plan
from openbook.indexstore.store import Draft, Manifest, ManifestFields, StageSeconds
from openbook.worker import memory
from openbook.worker.errors import IngestCancelled, NonFiniteKeys
from openbook.worker.halfway import base_from, can_be_entered
from openbook.worker.indexing import layer_plan, layer_records
from openbook.worker.models import Model, rotation
from openbook.worker.prefill import CapturedLayer, Prefill
from openbook.worker.resume import Checkpoints, Reading, reading_digest
from openbook.worker.tokens import DocumentTokens, document_tokens

Stage = Literal["tokenizing", "reading", "sealing"]


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """How a document is stored.

    `plan` forces one plan on every head, for measurement; a scan or a graph needs its own records.
    float16 gives way to bfloat16 for the whole context when a key or value does not fit it; the
    manifest says which was used. How far a reading is gets saved every `checkpoint_every_s`
    seconds, if the model can be entered halfway.
    """

    layout: str
    kv_dtype: KvDtype = "float16"
    params: IndexParams = field(default_factory=IndexParams)
    threads: int = 1
    plan: PlanKind | None = None
    checkpoint_every_s: float = 10.0

    @property
    def has_graph(self) -> bool:
        """Whether heads are built with what a scan and a walk read."""
        return self.plan in ("scan", "graph")


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far an ingest is; `layers_done` of `layers` are on disk."""

    stage: Stage
    layers_done: int
    layers: int


class _Float16Overflow(Exception):
    """A key or value is beyond float16: start again in bfloat16."""


def ingest(
    model: Model,
    document: bytes,
    draft: Draft,
    *,
    context_id: str,
    settings: IngestSettings,
    on_progress: Callable[[IngestProgress], None],
    is_cancelled: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    created_unix_s: int | None = None,
    left_bytes: memory.LeftBytes = memory.left_bytes,
) -> Manifest:
    """Read a document once and seal what was read into `draft`, which the caller publishes.

    A draft adopted from an earlier try of the same reading is gone on with, to the same bytes; of
    another reading it is cleared.

    Raises NotText, DocumentEmpty, DocumentTooLong, MemoryShort and LayoutUnavailable
    before the model runs; NonFiniteKeys, IngestCancelled and the store's own errors later. Nothing
    is sealed then.
    """
    layers = model.shape.layers
    on_progress(IngestProgress("tokenizing", 0, layers))
    started = clock()
    tokens = document_tokens(model, document, settings.layout)
    memory.refuse_without_room(
        model,
        len(tokens),
        kv_dtype=settings.kv_dtype,
        params=settings.params,
        has_graph=settings.has_graph,
        threads=settings.threads,
        left_bytes=left_bytes,
    )
    if is_cancelled():
        raise IngestCancelled
    checkpoints = Checkpoints(
        draft,
        context_id=context_id,
        made_from=_made_from(model, tokens, settings),
        every_s=settings.checkpoint_every_s,
        clock=clock,
    )
    reading = checkpoints.restore(model.device)
    if reading is None:
        draft.clear()
        draft.write_tokens(tokens.ids, tokens.offsets)
        reading = Reading(settings.kv_dtype)
    memory.unmap_large_blocks()
    tokenize_s = clock() - started
    while True:
        layer_writer = _LayerWriter(model, draft, settings, reading, checkpoints, clock=clock)
        try:
            _forward(model, tokens, layer_writer, on_progress, is_cancelled)
            break
        except _Float16Overflow:
            draft.drop_layers()
            reading = Reading("bfloat16", spent=reading.spent)
    if is_cancelled():
        raise IngestCancelled
    on_progress(IngestProgress("sealing", layers, layers))
    stages = StageSeconds(tokenize=tokenize_s, **asdict(reading.spent))
    created = int(time.time()) if created_unix_s is None else created_unix_s
    return draft.seal(
        _manifest_fields(
            model, tokens, reading, settings, context_id=context_id, stages=stages, created=created
        )
    )


def _forward(
    model: Model,
    tokens: DocumentTokens,
    layer_writer: _LayerWriter,
    on_progress: Callable[[IngestProgress], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """Run the model without its head over all tokens, each layer through the writer."""
    layers, first = model.shape.layers, layer_writer.reading.layer

    def sink(captured: CapturedLayer) -> None:
        layer_writer.write(captured)
        on_progress(IngestProgress("reading", captured.layer + 1, layers))

    on_progress(IngestProgress("reading", first, layers))
    base = model.base
    if can_be_entered(model):
        base = base_from(model, first, layer_writer.take_hidden(), on_layer=layer_writer.keep)
    ids = torch.from_numpy(tokens.ids.astype(np.int64)).to(model.device)
    with torch.inference_mode():
        base(
            input_ids=ids.unsqueeze(0),
            position_ids=torch.arange(len(tokens), device=model.device).unsqueeze(0),
            use_cache=False,
            openbook=Prefill(sink, is_cancelled=is_cancelled),
        )


class _LayerWriter:
    """Turns captured layers into records, one at a time, and writes each before the next."""

    def __init__(
        self,
        model: Model,
        draft: Draft,
        settings: IngestSettings,
        reading: Reading,
        checkpoints: Checkpoints,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.reading = reading
        self._draft = draft
        self._settings = settings
        self._checkpoints = checkpoints
        self._clock = clock
        self._since = clock()  # what is neither building nor writing is the model's
        self._rotation = rotation(model)
        self._layers = model.shape.layers

    def write(self, captured: CapturedLayer) -> None:
        """Index and write one layer. Raises NonFiniteKeys before anything of it is written."""
        started = self._clock()
        spent = self.reading.spent
        spent.prefill += started - self._since
        keys = self._stored(captured.layer, captured.k)  # (KV heads, n, d)
        values = self._stored(captured.layer, captured.v)  # (KV heads, n, dv)
        settings, turn, threads = self._settings, self._rotation, self._settings.threads
        records = layer_records(
            captured,
            keys,
            values,
            params=settings.params,
            has_graph=settings.has_graph,
            turn=turn,
            threads=threads,
        )
        del keys, values
        plan = layer_plan(captured, records.heads, forced=settings.plan, turn=turn, threads=threads)
        self.reading.plan.append(
            lift_plan(plan, records, scaling=captured.scaling, threads=threads)
        )
        built = self._clock()
        self._draft.write_layer(captured.layer, records)
        del records
        memory.return_free_memory()
        self.reading.layer = captured.layer + 1
        self._since = self._clock()
        spent.build += built - started
        spent.write += self._since - built

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Save how far the reading is after a layer, if it is time; the last one is sealed soon."""
        if layer + 1 < self._layers and self._checkpoints.is_due():
            started = self._clock()
            self._checkpoints.save(self.reading, hidden)
            saved_s = self._clock() - started
            self._since += saved_s
            self.reading.spent.write += saved_s

    def take_hidden(self) -> Tensor | None:
        """Return what the layer before the first gave, once: it is as large as a layer's input."""
        hidden, self.reading.hidden = self.reading.hidden, None
        return hidden

    def _stored(self, layer: int, rows: Tensor) -> Stored:
        """Round to the stored type; every number must be finite, before and after."""
        wide: NDArray[np.float32] = rows.float().cpu().numpy()
        finite = np.isfinite(wide)
        if not finite.all():
            head, position, _ = (int(i) for i in np.argwhere(~finite)[0])
            raise NonFiniteKeys(layer, head, position)
        if not fits(wide, self.reading.kv_dtype):
            raise _Float16Overflow
        return to_stored(wide, self.reading.kv_dtype)


def _made_from(model: Model, tokens: DocumentTokens, settings: IngestSettings) -> str:
    chosen = {
        "layout": settings.layout,
        "kv_dtype": settings.kv_dtype,
        "index": settings.params.fingerprint(),
        "plan": settings.plan,
    }
    return reading_digest(model, tokens, chosen)


def _manifest_fields(
    model: Model,
    tokens: DocumentTokens,
    reading: Reading,
    settings: IngestSettings,
    *,
    context_id: str,
    stages: StageSeconds,
    created: int,
) -> ManifestFields:
    shape, kv_dtype = model.shape, reading.kv_dtype
    row = shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim)
    fields = model.fingerprint_fields.stored_as(prompt_layout=settings.layout, kv_dtype=kv_dtype)
    return ManifestFields(
        context_id=context_id,
        model_fingerprint=fields.digest(),
        index_fingerprint=settings.params.fingerprint(),
        model_name=model.name,
        prompt_layout=settings.layout,
        token_count=len(tokens),
        layers=shape.layers,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        kv_dtype=kv_dtype,
        scaling=shape.scalings,
        plan=tuple(reading.plan),
        created_unix_s=created,
        stages_s=stages,
        kv_bytes_16bit=2 * row * len(tokens),
        model_parts=tuple(sorted(fields.parts().items())),
    )
