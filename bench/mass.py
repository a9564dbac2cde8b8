"""Whether the receipt's `mass_estimated` is the attention that the keys not read really have.

    python bench/mass.py --text FILE [--offset CHARS] --tokens 7000 --predict 128
        [--ask QUESTION …] [--keys 100] [--plan graph] [--out FILE.json]

Reads `--tokens` tokens of a text as a context. Then feeds the `--predict` tokens that follow, each
alone through the generated-token step; and asks each question, its answer being what the default
chooses, `--answer` tokens of it. Nothing of this was seen when the context was read. After every
step the exact attention to every key of the middle, less that to the keys read, says what the
figure of the step should have been: a mean over layers and query heads, as in the receipt.

    before   the estimate without the lifts in the manifest
    after    as served

Both are fed the same tokens, beside one sequence that reads every key: `kl` (nats) and `agreement`
are those of the next token against it. Prints a table, and as the last line one JSON object.
Knows the worker's modules, not only its face.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity import CHARACTERS_PER_TOKEN_MAX, Fidelity, cut_passage, read_passage
from numpy.typing import NDArray

from openbook.client.demo_model import demo_model
from openbook.indexstore.attend import attend
from openbook.indexstore.head import (
    EXACT,
    AttendRequest,
    AttendResult,
    Budget,
    LayerIndex,
    PlanKind,
)
from openbook.worker.decode import Runner, Sequence, Step
from openbook.worker.ingest import IngestSettings
from openbook.worker.models import Model, load_model
from openbook.worker.opened import OpenContexts, OpenedContext
from openbook.worker.retrieval import Retrieval
from openbook.worker.tokens import question_tokens

MODES = ("before", "after")


class AuditedRetrieval(Retrieval):
    """Answers as the service does, and keeps what every key of the middle would have said."""

    def __init__(self, *, threads: int) -> None:
        """Use up to `threads` threads for each call."""
        super().__init__(threads=threads)
        self._workers = threads
        self.unread_lses: list[list[NDArray[np.float64]]] = []  # [layer][sequence], (heads, 1)

    def attend(self, requests: Several[AttendRequest]) -> list[AttendResult]:
        """Answer every request, in order, and audit those of one row."""
        results = super().attend([request._replace(evidence=True) for request in requests])
        if requests and requests[0].queries.shape[1] == 1:
            everything = [request._replace(budget=EXACT) for request in requests]
            exact = attend(everything, threads=self._workers)
            self.unread_lses.append(
                [unread_lse(whole, found) for whole, found in zip(exact, results, strict=True)]
            )
        return results


def unread_lse(whole: AttendResult, found: AttendResult) -> NDArray[np.float64]:
    """Return the log of what the keys not read weigh, (query heads, 1); -inf where all are read."""
    shares = [
        np.exp(logits.astype(np.float64) - lse).sum()
        for logits, lse in zip(found.logits, whole.lse[:, 0].astype(np.float64), strict=True)
    ]
    with np.errstate(divide="ignore"):
        return whole.lse + np.log(np.maximum(0, 1 - np.array(shares)))[:, None]


class AuditedStep(Step):
    """A step that compares each sequence's estimate with the audit before it is charged."""

    masses: list[tuple[float, float]]  # per sequence: the receipt's figure, the audited one

    def finish(self) -> None:
        """Form both figures of the step, then do what a step does."""
        retrieval = self._retrieval
        assert isinstance(retrieval, AuditedRetrieval), "made by AuditedRunner"
        self.masses = []
        for number, found in enumerate(self._found):
            if not found.results:
                continue
            merged = torch.stack(found.lses).numpy().astype(np.float64)  # (layers, query heads, 1)
            estimated = np.exp(np.stack([r.estimated_lse for r in found.results]) - merged)
            unread = np.exp(np.stack([layer[number] for layer in retrieval.unread_lses]) - merged)
            true = unread / (1 - estimated + unread)  # the estimate's part of the whole replaced
            self.masses.append((float(estimated.mean()), float(true.mean())))
        retrieval.unread_lses.clear()
        super().finish()


class AuditedRunner(Runner):
    """A runner whose last step's masses can be read."""

    def _step(self, sequences: list[Sequence], rows: int, *, is_question: bool) -> Step:
        self.step = AuditedStep(
            sequences, rows, is_question=is_question, retrieval=self._retrieval, clock=self._clock
        )
        return self.step


@dataclass
class Audit:
    """Figures of the receipt beside the audited ones, a pair per token, and the fidelity."""

    asks: list[list[tuple[float, float]]] = field(default_factory=list)  # one list per ask
    fidelity: Fidelity = field(default_factory=Fidelity)

    def figures(self) -> dict[str, float]:
        """Return means and the 99th percentile of differences, per token and per ask."""
        tokens = np.array([pair for ask in self.asks for pair in ask])  # (tokens, 2)
        asks = np.array([np.mean(ask, axis=0) for ask in self.asks])  # (asks, 2)
        per_token, per_ask = (abs(pairs[:, 0] - pairs[:, 1]) for pairs in (tokens, asks))
        figures = {
            "receipt": tokens[:, 0].mean(),
            "audited": tokens[:, 1].mean(),
            "signed": (tokens[:, 0] - tokens[:, 1]).mean(),
            "token_mean": per_token.mean(),
            "token_p99": np.quantile(per_token, 0.99),
            "ask_mean": per_ask.mean(),
            "ask_max": per_ask.max(),
        }
        rounded = {name: round(float(value), 5) for name, value in figures.items()}
        return {**rounded, **self.fidelity.means()}


def sequences_of(
    model: Model, context: OpenedContext, budget: Budget, plan: PlanKind | None
) -> list[Sequence]:
    """Return one sequence per mode and one that reads every key."""
    before, after = (Sequence(model, context, budget=budget, plan=plan) for _ in MODES)
    before.layers = tuple(
        LayerIndex(one.heads, tuple(replace(head, lift=()) for head in one.plan))
        for one in before.layers
    )
    return [before, after, Sequence(model, context, budget=EXACT)]


def feed(
    runner: AuditedRunner,
    sequences: list[Sequence],
    audits: list[Audit],
    ids: list[int],
    *,
    count: int,
) -> None:
    """Run `count` tokens as one ask: the `ids`, then what the default chooses."""
    for audit in audits:
        audit.asks.append([])
    token = 0
    for at in range(count):
        token = ids[at] if at < len(ids) else token
        logits = runner.run_tokens(sequences, [token] * len(sequences))
        oracle = logits[-1].log_softmax(-1)
        for number, audit in enumerate(audits):
            audit.asks[-1].append(runner.step.masses[number])
            audit.fidelity.add(logits[number], oracle)
        token = int(logits[1].argmax())
        print(f"\rtoken {at + 1} ", end="", file=sys.stderr)


def measure(
    model: Model, context: OpenedContext, arguments: argparse.Namespace, next_ids: NDArray[np.int32]
) -> dict[str, dict[str, dict[str, float]]]:
    """Audit the continuation, cut into asks of `--answer` tokens, and each question."""
    runner = AuditedRunner(model, AuditedRetrieval(threads=arguments.threads), clock=time.monotonic)
    budget = Budget(keys=arguments.keys)
    results = {}
    if arguments.predict:
        audits = [Audit() for _ in MODES]
        sequences = sequences_of(model, context, budget, arguments.plan)
        for start in range(0, arguments.predict, arguments.answer):
            part = next_ids[start : start + arguments.answer].tolist()
            feed(runner, sequences, audits, part, count=len(part))
        results["continuation"] = {m: a.figures() for m, a in zip(MODES, audits, strict=True)}
    audits = [Audit() for _ in MODES]
    for question in arguments.ask:
        sequences = sequences_of(model, context, budget, arguments.plan)
        ids = question_tokens(model, question, "", arguments.layout)
        chosen = 0
        for sequence in sequences:
            logits = runner.run_block(sequence, ids, is_last=True)
            assert logits is not None, "logits were asked for"
            chosen = int(logits.argmax())
        feed(runner, sequences, audits, [chosen], count=arguments.answer)
    if arguments.ask:
        results["asks"] = {m: a.figures() for m, a in zip(MODES, audits, strict=True)}
    return results


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--offset", type=int, default=0, help="characters to skip")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--ask", action="append", default=[], metavar="QUESTION")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--keys", type=int, default=Budget().keys)
    parser.add_argument("--plan", choices=["clusters", "scan", "graph"])
    parser.add_argument("--model")
    parser.add_argument("--layout", default="completion")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args()


def main() -> None:
    """Measure and print the table and the JSON line."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model or demo_model())
    wanted = (arguments.tokens + arguments.predict) * CHARACTERS_PER_TOKEN_MAX
    text = arguments.text.read_text()[arguments.offset :][:wanted]
    passage = cut_passage(
        model,
        text,
        layout=arguments.layout,
        context_tokens=arguments.tokens,
        next_tokens=arguments.predict,
    )
    settings = IngestSettings(
        layout=arguments.layout, threads=arguments.threads, plan=arguments.plan
    )
    with tempfile.TemporaryDirectory() as root:
        path = read_passage(model, passage, Path(root), settings)
        context = OpenContexts(model, clock=time.monotonic).open(path, path.name)
        results = measure(model, context, arguments, passage.next_ids)
        context.close()
    print(f"\n{len(passage.context_ids)} context tokens, keys={arguments.keys}")
    for part, modes in results.items():
        for mode, row in modes.items():
            print(f"{part:12} {mode:7}", *(f"{name} {value:.5g}" for name, value in row.items()))
    whole: dict[str, Any] = {
        "tokens": len(passage.context_ids), "keys": arguments.keys, "plan": arguments.plan,
        "text": arguments.text.name, **results,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole))


if __name__ == "__main__":
    main()
