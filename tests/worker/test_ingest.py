"""Claims about ingest: what is stored, what is refused, and that a failure leaves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openbook.indexstore.attend import attend
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import EXACT, AttendRequest, LayerIndex
from openbook.indexstore.store import begin, open_context
from openbook.worker import reference
from openbook.worker.capture import DECODE_SPREAD, rotated_queries, sample_positions
from openbook.worker.errors import (
    DocumentEmpty,
    DocumentTooLong,
    IngestCancelled,
    NonFiniteKeys,
    NotText,
)
from openbook.worker.ingest import IngestProgress, IngestSettings, ingest
from openbook.worker.models import Model, rotation
from openbook.worker.prefill import CapturedLayer, Prefill
from openbook.worker.window import window_positions

Tiny = Callable[..., Model]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


def run(
    model: Model,
    document: bytes,
    root: Path,
    *,
    on_progress: Callable[[IngestProgress], None] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    **settings: Any,
) -> Any:
    """Ingest into a draft that is thrown away; return its manifest."""
    chosen = IngestSettings(**{"layout": "completion", **settings})
    with begin(root) as draft:
        return ingest(
            model,
            document,
            draft,
            context_id="context",
            settings=chosen,
            on_progress=on_progress,
            is_cancelled=is_cancelled,
        )


def captured(model: Model, document: bytes) -> list[CapturedLayer]:
    """Return what every layer's attention received, copied."""
    layers: list[CapturedLayer] = []

    def sink(one: CapturedLayer) -> None:
        layers.append(
            CapturedLayer(one.layer, one.q.clone(), one.k.clone(), one.v.clone(), one.scaling)
        )

    ids = torch.tensor([model.vocabulary.plain.encode(document.decode()).ids])
    with torch.inference_mode():
        model.base(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1]).unsqueeze(0),
            use_cache=False,
            openbook=Prefill(sink, is_cancelled=lambda: False),
        )
    return layers


@pytest.mark.parametrize("token_count", [3, 640, 641, 1000])
def test_every_key_and_value_is_stored_once(
    token_count: int, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("llama", 9, 3)
    layers = captured(model, digits(token_count))
    with open_context(read_context(model, digits(token_count)), model_fingerprint=None) as stored:
        for layer in layers:
            kept = stored.layer(layer.layer)
            for head in range(3):
                whole = np.zeros((2, token_count, 16), np.float32)
                window = window_positions(token_count)
                whole[0, window] = kept.window_keys[head]
                whole[1, window] = kept.window_values[head]
                if kept.heads:
                    middle, index = slice(128, token_count - 512), kept.heads[head]
                    whole[0, middle] = index.in_text_order(index.keys)
                    whole[1, middle] = index.in_text_order(index.values)
                assert np.array_equal(whole[0], layer.k[head].numpy())
                assert np.array_equal(whole[1], layer.v[head].numpy())
            kept = index = None


def test_manifest_describes_the_context(tiny_model: Tiny, digits: Digits, tmp_path: Path) -> None:
    model = tiny_model("granite")
    manifest = run(model, digits(700), tmp_path)
    assert manifest.token_count == 700 and manifest.context_id == "context"
    assert manifest.scaling == (0.11, 0.11) and manifest.kv_dtype == "float16"
    assert manifest.model_fingerprint == model.fingerprint_for("completion", "float16")
    assert manifest.kv_bytes_16bit == 700 * 2 * 2 * 2 * 16 * 2
    assert [len(layer) for layer in manifest.plan] == [2, 2]
    stages = manifest.stages_s
    assert stages.prefill > 0 and stages.build > 0 and stages.write > 0


def test_forced_plan_reaches_every_head(tiny_model: Tiny, digits: Digits, tmp_path: Path) -> None:
    manifest = run(tiny_model(), digits(700), tmp_path, plan="graph")
    assert {head.kind for layer in manifest.plan for head in layer} == {"graph"}


def test_stored_probes_are_the_exact_attention_over_the_middle(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("phi3")
    with open_context(read_context(model, digits(900)), model_fingerprint=None) as stored:
        for number in range(2):
            layer, manifest = stored.layer(number), stored.manifest
            keys = np.stack([to_float32(head.keys) for head in layer.heads])
            values = np.stack([to_float32(head.values) for head in layer.heads])
            assert layer.probe_queries.shape == (4, 4, 16)
            scaling = manifest.scaling[number]
            out, lse = reference.attend(layer.probe_queries, keys, values, scaling=scaling)
            np.testing.assert_allclose(layer.probe_out, out, atol=1e-4)
            np.testing.assert_allclose(layer.probe_lse, lse, atol=1e-4)
            index = LayerIndex(layer.heads, manifest.plan[number])
            request = AttendRequest(index, np.array(layer.probe_queries), scaling, EXACT)
            assert np.array_equal(attend([request])[0].out, layer.probe_out)
            del layer, index, request


def test_stored_training_queries_are_the_group_s_turned_to_decoding(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("llama", 4, 2)
    layers, positions = captured(model, digits(900)), sample_positions(900)
    turned = rotated_queries(layers[1].q, positions, rotation(model), spread=DECODE_SPREAD)
    with open_context(read_context(model, digits(900)), model_fingerprint=None) as stored:
        kept = stored.layer(1)
        queries, where = to_float32(kept.train_queries), np.array(kept.train_positions)
        del kept
    for kv_head in range(2):
        want = turned[2 * kv_head : 2 * kv_head + 2].reshape(-1, 16).numpy()
        np.testing.assert_allclose(queries[kv_head], want, rtol=1e-3, atol=1e-3)
        assert where[kv_head].tolist() == [*positions, *positions]


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (b"", DocumentEmpty),
        (b" \n\t" * 99, DocumentEmpty),
        (b"caf\xe9", NotText),
        (b"1" * 4097, DocumentTooLong),
    ],
)
def test_documents_are_refused_before_the_model_runs(
    document: bytes, error: type[Exception], tiny_model: Tiny, tmp_path: Path
) -> None:
    model = tiny_model()
    before = model.tokens_forwarded
    with pytest.raises(error):
        run(model, document, tmp_path)
    assert model.tokens_forwarded == before
    assert not list((tmp_path / ".tmp").iterdir())


def test_case_b16_a_document_of_every_position_is_read(tiny_model: Tiny, tmp_path: Path) -> None:
    assert run(tiny_model(), b"1" * 4096, tmp_path).token_count == 4096
    with pytest.raises(DocumentTooLong) as caught:
        run(tiny_model(), b"1" * 4097, tmp_path)
    assert (caught.value.tokens, caught.value.limit) == (4097, 4096)


def test_progress_counts_the_layers_on_disk(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    seen: list[tuple[str, int]] = []
    run(
        tiny_model(),
        digits(50),
        tmp_path,
        on_progress=lambda p: seen.append((p.stage, p.layers_done)),
    )
    assert seen == [("tokenizing", 0), *(("reading", i) for i in range(3)), ("sealing", 2)]


def test_cancel_leaves_nothing_and_stops_before_the_next_layer(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    seen: list[IngestProgress] = []
    with pytest.raises(IngestCancelled):
        run(
            tiny_model(),
            digits(700),
            tmp_path,
            on_progress=seen.append,
            is_cancelled=lambda: any(p.layers_done == 1 for p in seen),
        )
    assert max(p.layers_done for p in seen) == 1
    assert not list((tmp_path / ".tmp").iterdir())


@pytest.fixture
def change_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, ...], float], None]:
    """Return `(place, value)`: layer 1's keys get `value` at (head, position, channel)."""

    def change(place: tuple[int, ...], value: float) -> None:
        genuine = Prefill.attend

        def changed(
            self: Prefill, layer: int, q: Any, k: torch.Tensor, v: Any, *, scaling: float
        ) -> torch.Tensor:
            if layer == 1:
                k[(0, *place)] = value
            return genuine(self, layer, q, k, v, scaling=scaling)

        monkeypatch.setattr(Prefill, "attend", changed)

    return change


ChangeKeys = Callable[[tuple[int, ...], float], None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_case_b22_a_key_that_is_no_number_is_named_and_nothing_kept(
    bad: float, change_keys: ChangeKeys, tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    change_keys((1, 333, 5), bad)
    with pytest.raises(NonFiniteKeys) as caught:
        run(tiny_model(), digits(700), tmp_path)
    assert (caught.value.layer, caught.value.head, caught.value.position) == (1, 1, 333)
    assert not list((tmp_path / ".tmp").iterdir())


def test_a_value_beyond_float16_puts_the_whole_context_in_bfloat16(
    change_keys: ChangeKeys, tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    change_keys((0, 5, 0), 1e5)
    manifest = run(tiny_model(), digits(700), tmp_path)
    assert manifest.kv_dtype == "bfloat16"
    assert manifest.model_fingerprint == tiny_model().fingerprint_for("completion", "bfloat16")
    kinds = {r.info.dtype for f in manifest.files for r in f.records if r.info.kind.label == "keys"}
    assert kinds == {"bfloat16"}


def test_case_b11_keys_and_values_are_stored_per_kv_head(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    manifest = run(tiny_model("llama", 9, 3), digits(2000), tmp_path)
    labels = ("keys", "values", "window_keys", "window_values")
    stored = sum(
        record.info.payload_bytes
        for file in manifest.files
        for record in file.records
        if record.info.kind.label in labels
    )
    assert stored == manifest.kv_bytes_16bit == 2000 * 2 * 3 * 16 * 2 * 2


def test_stage_seconds_follow_the_given_clock(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    ticks = iter(range(10**6))
    with begin(tmp_path) as draft:
        manifest = ingest(
            tiny_model(),
            digits(50),
            draft,
            context_id="context",
            settings=IngestSettings("completion"),
            on_progress=lambda _: None,
            is_cancelled=lambda: False,
            clock=lambda: float(next(ticks)),
            created_unix_s=17,
        )
    assert manifest.created_unix_s == 17
    assert manifest.stages_s.build == 2 and manifest.stages_s.write == 2  # a tick a layer
