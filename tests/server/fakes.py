"""Stand-ins for the model: FakeModel, FakeReading and FakeEngine have the face of openbook.worker.

They write and open real contexts, and run at the speed that a test sets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from openbook import worker
from openbook.indexstore.errors import FingerprintMismatch
from openbook.indexstore.layer import LayerRecords
from openbook.indexstore.store import ManifestFields, StageSeconds, open_context
from openbook.worker.sampling import SamplingSettings, check_answer_limits

LAYERS, KV_HEADS, QUERY_HEADS, HEAD_DIM = 2, 1, 2, 16
TOKENS_MAX = 600


class FakeModel:
    """A model of two layers; a token is a byte."""

    name = "fake/model"
    prompt_layouts = ("completion", "chat")
    tokens_forwarded = 0
    shape = SimpleNamespace(
        layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        value_dim=HEAD_DIM, positions_max=4096, scalings=(0.25, 0.25),
    )  # fmt: skip

    def __init__(self, weights: str = "weights-a") -> None:
        self.fingerprint = weights

    def fingerprint_for(self, layout: str, kv_dtype: str) -> str:
        """Fold layout and number type in, as the real one does."""
        return f"{self.fingerprint}/{layout}/{kv_dtype}"


class FakeReading:
    """The worker's `ingest`, which a test can hold between layers, fail, and count."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.created_unix_s: list[int] = []
        self.error: BaseException | None = None

    def __call__(
        self,
        model: Any,
        document: bytes,
        draft: Any,
        *,
        context_id: str,
        settings: Any,
        on_progress: Callable[[Any], None],
        is_cancelled: Callable[[], bool],
        created_unix_s: int,
    ) -> Any:
        """Write and seal a context of one token per byte, all of them in the window."""
        self.calls.append(context_id)
        self.created_unix_s.append(created_unix_s)
        if not document.strip():
            raise worker.DocumentEmpty()
        if len(document) > TOKENS_MAX:
            raise worker.DocumentTooLong(len(document), TOKENS_MAX)
        ids = np.frombuffer(document, np.uint8).astype(np.int32)
        offsets = np.stack([np.arange(len(ids)), np.arange(1, len(ids) + 1)], 1).astype(np.int32)
        draft.write_tokens(ids, offsets)
        for layer in range(LAYERS):
            on_progress(worker.IngestProgress("reading", layer, LAYERS))
            while not self.gate.wait(0.01):
                if is_cancelled():
                    raise worker.IngestCancelled()
            if self.error is not None:
                raise self.error
            draft.write_layer(layer, _window_only(len(ids)))
        on_progress(worker.IngestProgress("sealing", LAYERS, LAYERS))
        fields = _fields(model, context_id, settings, tokens=len(ids), created=created_unix_s)
        return draft.seal(fields)


def _window_only(tokens: int) -> LayerRecords:
    window = np.zeros((KV_HEADS, tokens, HEAD_DIM), np.float16)
    return LayerRecords(
        heads=(),
        window_keys=window,
        window_values=window,
        train_queries=np.zeros((KV_HEADS, 0, HEAD_DIM), np.float16),
        train_positions=np.zeros((KV_HEADS, 0), np.int32),
        probe_queries=np.zeros((QUERY_HEADS, 0, HEAD_DIM), np.float32),
        probe_out=np.zeros((QUERY_HEADS, 0, HEAD_DIM), np.float32),
        probe_lse=np.zeros((QUERY_HEADS, 0), np.float32),
    )


def _fields(
    model: Any, context_id: str, settings: Any, *, tokens: int, created: int
) -> ManifestFields:
    return ManifestFields(
        context_id=context_id,
        model_fingerprint=model.fingerprint_for(settings.layout, settings.kv_dtype),
        index_fingerprint="none",
        model_name=model.name,
        prompt_layout=settings.layout,
        token_count=tokens,
        layers=LAYERS,
        query_heads=QUERY_HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        kv_dtype=settings.kv_dtype,
        scaling=(0.25, 0.25),
        plan=((),) * LAYERS,
        created_unix_s=created,
        stages_s=StageSeconds(tokenize=0.1, prefill=0.2, build=0.3, write=0.4),
        kv_bytes_16bit=2 * 2 * LAYERS * KV_HEADS * HEAD_DIM * tokens,
    )


class FakeOpened:
    """A claim on an open context; counts the holders of one load."""

    def __init__(self, stored: Any, holders: list[int]) -> None:
        self._stored = stored
        self._holders = holders
        self._is_open = True
        holders[0] += 1

    @property
    def manifest(self) -> Any:
        """The manifest of the context."""
        return self._stored.manifest

    def hold(self) -> FakeOpened:
        """Return one more claim."""
        return FakeOpened(self._stored, self._holders)

    def close(self) -> None:
        """Give the claim back."""
        if self._is_open:
            self._is_open = False
            self._holders[0] -= 1
            if not self._holders[0]:
                self._stored.close()


class FakeAsk:
    """An ask of the fake engine: `tokens` counts what was said."""

    def __init__(self, spec: Any, claim: FakeOpened, on_event: Callable[[Any], None]) -> None:
        self.spec = spec
        self.claim = claim
        self.on_event = on_event
        self.question_ids = spec.question.split()
        self.tokens = 0
        self.asked_at: float | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Stop before the next token."""
        self.is_cancelled = True


class FakeEngine:
    """Says `<question's first word>-<i> ` for each token of every ask, one round at a time."""

    def __init__(self, model: FakeModel) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.loads = 0
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.crash: BaseException | None = None
        self.explosion: type[BaseException] = RuntimeError
        self.asks: list[FakeAsk] = []
        self._model = model
        self._live: dict[Path, tuple[Any, list[int]]] = {}
        self._lock = threading.Lock()

    def open(self, path: Path, context_id: str) -> FakeOpened:
        """Open a context, verified; shared while someone holds it."""
        self.open_gate.wait(10)
        with self._lock:
            live = self._live.get(path)
            if live is None or not live[1][0]:
                kinds = ("completion", "chat")
                prints = {self._model.fingerprint_for(kind, "float16") for kind in kinds}
                stored = open_context(path, model_fingerprint=None)
                found = stored.manifest
                if found.model_fingerprint not in prints or found.context_id != context_id:
                    stored.close()
                    raise FingerprintMismatch("model_fingerprint", "a", "b")
                self.loads += 1
                live = self._live[path] = (stored, [0])
            return FakeOpened(*live)

    def retire(self, path: Path, context_id: str) -> None:
        """Forget what is open at a path; claims on it stay."""
        with self._lock:
            self._live.pop(path, None)

    def submit(
        self,
        spec: Any,
        context: FakeOpened,
        on_event: Callable[[Any], None],
        *,
        asked_at: float | None = None,
    ) -> FakeAsk:
        """Queue an ask, within the limits of the real engine."""
        check_answer_limits(max_tokens=spec.max_tokens, stop=spec.stop)
        SamplingSettings(spec.temperature, spec.top_p, spec.seed)
        if spec.question.startswith("explode"):
            raise self.explosion(f"about {spec.question}")
        ask = FakeAsk(spec, context.hold(), on_event)
        ask.asked_at = asked_at
        with self._lock:
            self.asks.append(ask)
        return ask

    def run(self, stop: threading.Event) -> None:
        """Give every ask a token a round until told to stop."""
        running: list[FakeAsk] = []
        seen = 0
        while not stop.is_set():
            if self.crash is not None:
                raise self.crash
            with self._lock:
                running += self.asks[seen:]
                seen = len(self.asks)
            if not running or not self.gate.wait(0.005):
                time.sleep(0.001)
            for ask in running if self.gate.is_set() else ():
                self._say(ask)
            for ask in [ask for ask in running if self._is_over(ask)]:
                ask.claim.close()
                running.remove(ask)

    def _say(self, ask: FakeAsk) -> None:
        if ask.is_cancelled:
            return
        if ask.spec.question.startswith("fail"):
            ask.is_cancelled = True
            ask.on_event(worker.Failed(self.explosion(f"about {ask.spec.question}")))
            return
        ask.on_event(worker.Delta(f"{ask.question_ids[0]}-{ask.tokens} "))
        ask.tokens += 1
        if ask.tokens == ask.spec.max_tokens:
            usage = worker.Usage(ask.claim.manifest.token_count, len(ask.question_ids), ask.tokens)
            ask.on_event(worker.Finished(usage, "length", _receipt(ask)))

    def _is_over(self, ask: FakeAsk) -> bool:
        return ask.is_cancelled or ask.tokens == ask.spec.max_tokens


def _receipt(ask: FakeAsk) -> Any:
    return worker.Receipt(
        tokens_reused=ask.claim.manifest.token_count, tokens_prefilled=len(ask.question_ids),
        keys_scored=0.0, centroids_scored=0.0, keys_read=0.0, mass_estimated=0.0, open_ms=1.0,
        queue_ms=1.0, question_ms=1.0, first_token_ms=1.0, token_ms=1.0, middle_ms=1.0,
        device_ms=1.0, budget="keys=100+estimate", plan="window", bytes_mapped=1,
    )  # fmt: skip
