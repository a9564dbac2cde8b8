"""Running tokens behind a context: a question's blocks, and one token of every sequence at once.

Owns the sequence (where it stands, what it may read) and the attention handler that joins window,
tail and middle. It knows nothing of text, sampling or scheduling.

    keys of a row at position p    window (device) ∪ middle (indexstore) ∪ tail up to p (device)

Question rows read the middle exactly; a generated token reads what its budget allows. Positions go
on from the context's: n, n + 1, …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.indexstore.head import (
    EXACT,
    AttendRequest,
    AttendResult,
    Budget,
    LayerIndex,
    PlanKind,
)
from openbook.indexstore.plan import force_plan
from openbook.worker.errors import BadAsk
from openbook.worker.merge import Partial, attend_keys, merge
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext
from openbook.worker.retrieval import Retrieval, to_host, to_partial
from openbook.worker.tail import Tail
from openbook.worker.window import middle_range, window_positions

BLOCK_TOKENS = 256  # question rows per model call: fixed, so that a replay has the same bounds


@dataclass(slots=True)
class Cost:
    """What the generated tokens of one sequence read and took, summed over `steps` tokens.

    Counts are over layers and KV heads; `mass_estimated` is a mean over layers and query heads,
    summed over steps. Seconds are those of the whole batch a token was in.
    """

    steps: int = 0
    keys_read: int = 0
    keys_scored: int = 0
    centroids_scored: int = 0
    mass_estimated: float = 0.0
    middle_s: float = 0.0
    device_s: float = 0.0


class Sequence:
    """One session over a context: its tail, its budget, and what it has cost."""

    def __init__(
        self,
        model: Model,
        context: OpenedContext,
        *,
        budget: Budget,
        plan: PlanKind | None = None,
    ) -> None:
        """Start right after the context. `plan` forces one on every head, for measurement.

        Raises BadAsk when the context was not stored with what that plan reads.
        """
        shape = model.shape
        layers = context.layers
        if plan is not None:
            if not all(head.serves(plan) for layer in layers for head in layer.heads):
                raise BadAsk("plan", "is one that this context has no index for")
            layers = tuple(LayerIndex(one.heads, force_plan(one.plan, plan)) for one in layers)
        self.context = context
        self.budget = budget
        self.token_count = context.token_count
        self.window = context.window
        self.layers = layers
        self.cost = Cost()
        self.tail = Tail(
            shape.layers,
            shape.kv_heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            device=model.device,
            dtype=model.module.dtype,
        )

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.token_count + self.tail.length

    @property
    def has_middle(self) -> bool:
        """Whether any token of the context is outside the window."""
        return len(middle_range(self.token_count)) > 0

    def partition(self) -> tuple[NDArray[np.int64], range, range]:
        """Return the positions read from window, middle and tail: disjoint, and all there are."""
        tail = range(self.token_count, self.position)
        return window_positions(self.token_count), middle_range(self.token_count), tail


@dataclass(slots=True)
class _Found:
    """What the layers of one budgeted step found, per sequence; summed up after the step."""

    results: list[AttendResult] = field(default_factory=list)
    lses: list[Tensor] = field(default_factory=list)  # merged, (query heads, 1)


class Step:
    """The attention handler of one model call: `rows` tokens of one sequence, or one of each.

    Rows of a question read the middle exactly; a generated row reads by its sequence's budget and
    is charged to its cost.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        rows: int,
        *,
        is_question: bool,
        retrieval: Retrieval,
        clock: Callable[[], float],
    ) -> None:
        """Prepare the tails of all sequences for `rows` more tokens."""
        assert sequences and (rows == 1 or len(sequences) == 1), "blocks run one sequence at a time"
        self._sequences = sequences
        self._rows = rows
        self._is_question = is_question
        self._retrieval = retrieval
        self._clock = clock
        self._found = [_Found() for _ in sequences]
        self._device_s = 0.0
        self._middle_s = 0.0
        for sequence in sequences:
            sequence.tail.reserve(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
        """Attend to window, tail and middle, and merge. The device's work is launched first."""
        started = self._clock()
        asking = [i for i, sequence in enumerate(self._sequences) if sequence.has_middle]
        queries = to_host(q) if asking else None  # (B, query heads, T, d)
        partials = self._device_partials(layer, q, k, v, scaling)
        launched = self._clock()
        if queries is not None:
            requests = [self._request(i, layer, queries[i], scaling) for i in asking]
            results = self._retrieval.attend(requests)
            answered = self._clock()
            self._middle_s += answered - launched
            started += answered - launched  # what is left is the device's
            for i, result in zip(asking, results, strict=True):
                partials[i].append(to_partial(result, q.device))
                if not self._is_question:
                    self._found[i].results.append(result)
        merged = [merge(parts) for parts in partials]
        for found, whole in zip(self._found, merged, strict=True):
            if found.results:
                found.lses.append(whole.lse)
        out = torch.stack([whole.out for whole in merged]).to(q.dtype)
        self._device_s += self._clock() - started
        return out

    def finish(self) -> None:
        """Keep the new rows and charge what was read, after the model call has returned."""
        for sequence, found in zip(self._sequences, self._found, strict=True):
            sequence.tail.advance(self._rows)
            if self._is_question:
                continue
            cost = sequence.cost
            cost.steps += 1
            cost.device_s += self._device_s
            cost.middle_s += self._middle_s
            cost.keys_read += sum(result.keys_read for result in found.results)
            cost.keys_scored += sum(result.keys_scored for result in found.results)
            cost.centroids_scored += sum(result.centroids_scored for result in found.results)
            if found.results:
                estimated = np.stack([result.estimated_lse for result in found.results])
                merged = torch.stack(found.lses).cpu().numpy()  # (layers, query heads, 1)
                cost.mass_estimated += float(np.exp(estimated - merged).mean())

    def _request(
        self, i: int, layer: int, queries: NDArray[np.float32], scaling: float
    ) -> AttendRequest:
        sequence = self._sequences[i]
        return AttendRequest(
            layer=sequence.layers[layer],
            queries=queries,
            scaling=scaling,
            budget=EXACT if self._is_question else sequence.budget,
        )

    def _device_partials(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float
    ) -> list[list[Partial]]:
        """Attend to the windows, one product per distinct window, and to each tail."""
        windows = self._window_partials(layer, q, scaling)
        partials = []
        for i, sequence in enumerate(self._sequences):
            past = sequence.tail.length
            tail_keys, tail_values = sequence.tail.append(layer, k[i], v[i])
            parts = [windows[i]]
            if self._rows == 1:
                parts.append(attend_keys(q[i], tail_keys, tail_values, scaling=scaling))
            else:
                # Row r of the block sees all of the tail before it and rows 0..r of the block.
                if past:
                    before = tail_keys[:, :past], tail_values[:, :past]
                    parts.append(attend_keys(q[i], *before, scaling=scaling))
                parts.append(attend_keys(q[i], k[i], v[i], scaling=scaling, is_causal=True))
            partials.append(parts)
        return partials

    def _window_partials(self, layer: int, q: Tensor, scaling: float) -> list[Partial]:
        if len(self._sequences) == 1:
            window = self._sequences[0].window
            return [attend_keys(q[0], window.keys[layer], window.values[layer], scaling=scaling)]
        sharing: dict[int, list[int]] = {}
        for i, sequence in enumerate(self._sequences):
            sharing.setdefault(id(sequence.window), []).append(i)
        partials: dict[int, Partial] = {}
        for members in sharing.values():
            window = self._sequences[members[0]].window
            rows = q[members, :, 0].transpose(0, 1)  # (query heads, members, d)
            together = attend_keys(
                rows.contiguous(), window.keys[layer], window.values[layer], scaling=scaling
            )
            for row, i in enumerate(members):
                one = slice(row, row + 1)
                partials[i] = Partial(together.out[:, one], together.lse[:, one])
        return [partials[i] for i in range(len(self._sequences))]


class Runner:
    """Runs token ids through a model behind their contexts."""

    def __init__(self, model: Model, retrieval: Retrieval, *, clock: Callable[[], float]) -> None:
        """Use `clock`, in seconds, for the costs."""
        self._model = model
        self._retrieval = retrieval
        self._clock = clock

    def run_block(
        self, sequence: Sequence, ids: NDArray[np.int32], *, is_last: bool
    ) -> Tensor | None:
        """Run a block of a question; return the logits (vocabulary,) after it if it is the last.

        A block that fails leaves the sequence as it was.
        """
        step = self._step([sequence], len(ids), is_question=True)
        first = sequence.position
        positions = torch.arange(first, first + len(ids), device=self._model.device)
        rows = torch.from_numpy(ids.astype(np.int64)).to(self._model.device)
        logits = self._call(rows.unsqueeze(0), positions.unsqueeze(0), step, wants_logits=is_last)
        step.finish()
        return None if logits is None else logits[0]

    def run_tokens(self, sequences: list[Sequence], ids: list[int]) -> Tensor:
        """Run one generated token of each sequence; return logits (sequences, vocabulary)."""
        step = self._step(sequences, 1, is_question=False)
        device = self._model.device
        positions = torch.tensor([[sequence.position] for sequence in sequences], device=device)
        rows = torch.tensor([[token] for token in ids], device=device)
        logits = self._call(rows, positions, step, wants_logits=True)
        assert logits is not None, "logits were asked for"
        step.finish()
        return logits

    def _step(self, sequences: list[Sequence], rows: int, *, is_question: bool) -> Step:
        return Step(
            sequences,
            rows,
            is_question=is_question,
            retrieval=self._retrieval,
            clock=self._clock,
        )

    def _call(
        self, ids: Tensor, positions: Tensor, step: Step, *, wants_logits: bool
    ) -> Tensor | None:
        """Forward ids (B, T) at positions (B, T); return the last row's logits (B, vocabulary)."""
        with torch.inference_mode():
            if not wants_logits:
                self._model.base(
                    input_ids=ids, position_ids=positions, use_cache=False, openbook=step
                )
                return None
            answer = self._model.module(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                openbook=step,
            )
            logits: Tensor = answer.logits[:, -1]
            return logits
