"""Going on with a reading that was cut short, after the last layer whose output was saved.

Owns what is saved of a reading between two layers, when, and whether it fits the reading that is to
go on. The files are the draft's; entering the model is halfway.py's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openbook.indexstore.head import HeadPlan, KvDtype
from openbook.indexstore.store import Draft
from openbook.worker.models import Model
from openbook.worker.tokens import DocumentTokens

_TORCH_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(slots=True)
class Spent:
    """Seconds of an ingest so far, over all its tries."""

    prefill: float = 0.0
    build: float = 0.0
    write: float = 0.0


@dataclass(slots=True)
class Reading:
    """How far a reading is: the layers before `layer` are in the draft."""

    kv_dtype: KvDtype
    layer: int = 0
    hidden: Tensor | None = None  # (1, n, hidden size), what layer - 1 gave; None for layer 0
    plan: list[tuple[HeadPlan, ...]] = field(default_factory=list)
    spent: Spent = field(default_factory=Spent)


class Checkpoints:
    """The checkpoints of one reading in its draft."""

    def __init__(
        self,
        draft: Draft,
        *,
        context_id: str,
        made_from: str,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Save at most each `every_s` seconds; `made_from` (reading_digest) says what is read."""
        self._draft = draft
        self._context_id = context_id
        self._made_from = made_from
        self._every_s = every_s
        self._clock = clock
        self._saved_at = clock()

    def restore(self, device: torch.device) -> Reading | None:
        """Return the reading that the draft can go on with; None if there is none that fits."""
        checkpoint = self._draft.checkpoint
        if checkpoint is None or checkpoint.state.get("made_from") != self._made_from:
            return None
        state = checkpoint.state
        raw = np.fromfile(self._draft.path / checkpoint.blob.name, np.uint8)
        hidden = torch.from_numpy(raw).view(_TORCH_DTYPES[state["dtype"]]).view(state["shape"])
        return Reading(
            kv_dtype=state["kv_dtype"],
            layer=state["layers"],
            hidden=hidden.to(device),
            plan=[tuple(_plan_from(head) for head in layer) for layer in state["plan"]],
            spent=Spent(**state["spent"]),
        )

    def is_due(self) -> bool:
        """Say whether a checkpoint is worth its while now."""
        return self._clock() - self._saved_at >= self._every_s

    def save(self, reading: Reading, hidden: Tensor) -> None:
        """Save how far a reading is; `hidden` (1, n, hidden size) is what its last layer gave.

        Raises the store's errors.
        """
        flat = hidden.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        blob = memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer
        state = {
            "made_from": self._made_from,
            "layers": reading.layer,
            "kv_dtype": reading.kv_dtype,
            "dtype": str(hidden.dtype),
            "shape": list(hidden.shape),
            "plan": [[dataclasses.asdict(head) for head in layer] for layer in reading.plan],
            "spent": dataclasses.asdict(reading.spent),
        }
        # As JSON keeps it: tuples become lists.
        self._draft.save(self._context_id, json.loads(json.dumps(state)), blob)
        self._saved_at = self._clock()


def reading_digest(model: Model, tokens: DocumentTokens, settings: dict[str, Any]) -> str:
    """Return the SHA-256 of all that decides what a reading stores."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(json.dumps(model.fingerprint_fields.parts(), sort_keys=True).encode())
    digest.update(tokens.ids.tobytes())
    digest.update(tokens.offsets.tobytes())
    return digest.hexdigest()


def _plan_from(saved: dict[str, Any]) -> HeadPlan:
    return HeadPlan(saved["kind"], saved["queue"], tuple(saved["lift"]), saved["reach"])
