"""A reading that was cut short goes on after its last saved layer, to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from openbook.indexstore.store import Draft, adopt, begin
from openbook.worker.errors import IngestCancelled
from openbook.worker.ingest import IngestProgress, IngestSettings, ingest
from openbook.worker.models import Model

Tiny = Callable[..., Model]
Digits = Callable[[int], bytes]
LABEL = "a" * 32
SHARDS = ("tokens.mdb", "layer-000.mdb", "layer-001.mdb", "layer-002.mdb")


class Killed(Exception):
    """Stands for a SIGKILL: nothing after it runs."""


def read(
    model: Model, document: bytes, draft: Draft, *, killed_at: int | None = None, **changes: Any
) -> list[int]:
    """Ingest into a draft; with `killed_at` stop after that layer. Return the layers that ran."""
    ran: list[int] = []
    every_s = changes.pop("checkpoint_every_s", 0.0)
    settings = IngestSettings(
        layout="completion", checkpoint_every_s=every_s, **{"kv_dtype": "float32", **changes}
    )

    def tell(progress: IngestProgress) -> None:
        if progress.stage == "reading":
            ran.append(progress.layers_done - 1)  # the first says where it starts
            if progress.layers_done - 1 == killed_at:
                raise Killed

    seconds: Iterator[int] = count()
    ingest(
        model,
        document,
        draft,
        context_id=LABEL,
        settings=settings,
        on_progress=tell,
        is_cancelled=lambda: False,
        clock=lambda: float(next(seconds)),
        created_unix_s=1,
    )
    return ran[1:]


def killed(model: Model, document: bytes, root: Path, at: int, **changes: Any) -> None:
    draft = begin(root)
    with pytest.raises(Killed):
        read(model, document, draft, killed_at=at, **changes)
    draft.release()


def stored(draft: Draft) -> dict[str, bytes]:
    return {name: (draft.path / name).read_bytes() for name in SHARDS}


@pytest.fixture
def model(tiny_model: Tiny) -> Model:
    return tiny_model("llama", 9, 3, num_hidden_layers=3)


@pytest.mark.parametrize(("at", "ran"), [(1, [1, 2]), (2, [2])])
@pytest.mark.parametrize("tokens", [700, 300])
def test_a_reading_gone_on_with_stores_the_same_bytes(
    model: Model, digits: Digits, tmp_path: Path, at: int, ran: list[int], tokens: int
) -> None:
    document = digits(tokens)
    with begin(tmp_path / "whole") as draft:
        assert read(model, document, draft) == [0, 1, 2]
        whole, plan = stored(draft), draft.manifest and draft.manifest.plan
    killed(model, document, tmp_path, at)
    again = adopt(tmp_path, LABEL)
    assert again is not None
    with again:
        assert read(model, document, again) == ran
        assert stored(again) == whole
        assert again.manifest is not None and again.manifest.plan == plan
        stages = again.manifest.stages_s
        assert stages.prefill > 0 and stages.build > 0  # those of the first try count too
        assert {path.name for path in again.path.iterdir()} == {*SHARDS, "manifest.json"}


def test_a_reading_killed_before_a_checkpoint_starts_again(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    killed(model, digits(700), tmp_path, 0)
    assert adopt(tmp_path, LABEL) is None


@pytest.mark.parametrize(
    "changes",
    [{"kv_dtype": "bfloat16"}, {"plan": "graph"}, {"document": 701}, {"model": ("llama", 9, 9)}],
    ids=lambda changes: next(iter(changes)),
)
def test_another_reading_starts_again(
    model: Model, tiny_model: Tiny, digits: Digits, tmp_path: Path, changes: dict[str, Any]
) -> None:
    killed(model, digits(700), tmp_path, 1)
    draft = adopt(tmp_path, LABEL)
    assert draft is not None
    document = digits(changes.pop("document", 700))
    if "model" in changes:
        model = tiny_model(*changes.pop("model"), num_hidden_layers=3)
    with draft:
        assert read(model, document, draft, **changes) == [0, 1, 2]
        fresh = begin(tmp_path / "fresh")
        with fresh:
            read(model, document, fresh, **changes)
            assert stored(draft) == stored(fresh)


def test_nothing_is_saved_before_its_time(model: Model, digits: Digits, tmp_path: Path) -> None:
    killed(model, digits(700), tmp_path, 2, checkpoint_every_s=1e9)
    assert adopt(tmp_path, LABEL) is None


def test_a_reading_in_bfloat16_hidden_states_goes_on(
    tiny_model: Tiny, digits: Digits, tmp_path: Path
) -> None:
    model = tiny_model("llama", 9, 3, num_hidden_layers=3)
    model.module.to(torch.bfloat16)
    document = digits(700)
    with begin(tmp_path / "whole") as draft:
        read(model, document, draft)
        whole = stored(draft)
    killed(model, document, tmp_path, 2)
    again = adopt(tmp_path, LABEL)
    assert again is not None
    with again:
        assert read(model, document, again) == [2]
        assert stored(again) == whole


def test_a_cancelled_reading_can_be_gone_on_with(
    model: Model, digits: Digits, tmp_path: Path
) -> None:
    draft, steps = begin(tmp_path), count()
    with pytest.raises(IngestCancelled):
        ingest(
            model,
            digits(700),
            draft,
            context_id=LABEL,
            settings=IngestSettings(layout="completion", checkpoint_every_s=0.0),
            on_progress=lambda _: None,
            is_cancelled=lambda: next(steps) >= 3,
        )
    draft.release()
    again = adopt(tmp_path, LABEL)
    assert again is not None and again.checkpoint is not None
    assert again.checkpoint.state["layers"] >= 1
    again.discard()
