"""How close answers under a budget are to full attention, on real text.

    python bench/fidelity.py --text FILE --offset CHARS --tokens 7400 --predict 512 [--plan graph]

Reads `--tokens` tokens of a text as a context, then feeds the `--predict` tokens that follow,
each alone through the generated-token step, and compares the next-token distribution after each
with full attention of the same weights (transformers' own, one forward over everything).

    default      keys = 100 per query head, the rest estimated
    plain        keys = 100, the rest dropped
    window_only  nothing of the middle
    noise        full attention against itself: token by token against one block

Prints a table, and as the last line one JSON object. Knows the worker's modules, not only its face.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openbook.client.demo_model import demo_model
from openbook.indexstore.head import Budget
from openbook.indexstore.store import begin, publish
from openbook.worker.attention import NAME
from openbook.worker.decode import Runner, Sequence
from openbook.worker.ingest import IngestProgress, IngestSettings, ingest
from openbook.worker.merge import attend_keys, causal_attention
from openbook.worker.models import Model, load_model
from openbook.worker.opened import OpenContexts, OpenedContext
from openbook.worker.retrieval import Retrieval
from openbook.worker.tokens import document_tokens

MODES = {
    "default": Budget(),
    "plain": Budget(estimate=False),
    "window_only": Budget(keys=0, estimate=False),
}
CHARACTERS_PER_TOKEN_MAX = 12  # how much text is taken to be sure of enough tokens


@dataclass(frozen=True)
class Passage:
    """A document of exactly `tokens` context tokens, and the ids that follow it in the text."""

    document: bytes
    context_ids: NDArray[np.int32]
    next_ids: NDArray[np.int32]


def cut_passage(
    model: Model, text: str, *, layout: str, context_tokens: int, next_tokens: int
) -> Passage:
    """Cut a text so that its start is a document of exactly `context_tokens` tokens.

    A cut that would be tokenised otherwise than the whole text is moved on by whole tokens; the
    context is then that much longer.
    """
    encoding = model.vocabulary.plain.encode(text, add_special_tokens=False)
    before = len(document_tokens(model, b"x", layout)) - 1  # the template's own tokens
    for at in range(context_tokens - before, len(encoding.ids) - next_tokens):
        document = text[: encoding.offsets[at][0]].encode()
        ids = document_tokens(model, document, layout).ids
        if ids[before:].tolist() == encoding.ids[:at]:
            following = np.array(encoding.ids[at : at + next_tokens], dtype=np.int32)
            return Passage(document, ids, following)
    raise SystemExit(f"the text has fewer than {context_tokens + next_tokens} tokens")


def read_passage(model: Model, passage: Passage, root: Path, settings: IngestSettings) -> Path:
    """Ingest the passage under `root` and return the context's path."""

    def progress(done: IngestProgress) -> None:
        print(f"\r{done.stage} {done.layers_done}/{done.layers} ", end="", file=sys.stderr)

    final = root / "passage"
    with begin(root) as draft:
        manifest = ingest(
            model,
            passage.document,
            draft,
            context_id=final.name,
            settings=settings,
            on_progress=progress,
            is_cancelled=lambda: False,
        )
        publish(draft, final)
    print(f"\ningest: {manifest.stages_s}", file=sys.stderr)
    return final


@dataclass
class Fidelity:
    """Agreement and KL against an oracle, summed over tokens."""

    tokens: int = 0
    agreed: int = 0
    kl: float = 0.0

    def add(self, logits: Tensor, oracle: Tensor) -> None:
        """Add one token: logits and the oracle's log-probabilities, both (vocabulary,)."""
        self.tokens += 1
        self.agreed += int(logits.argmax() == oracle.argmax())
        self.kl += float((oracle.exp() * (oracle - logits.log_softmax(-1))).sum())

    def means(self) -> dict[str, float]:
        """Return the share of equal greedy choices and the mean KL(oracle ‖ ours) in nats."""
        return {
            "agreement": round(self.agreed / self.tokens, 5),
            "kl": float(f"{self.kl / self.tokens:.4g}"),
        }


def budgeted(
    model: Model, context: OpenedContext, passage: Passage, oracle: Tensor, *, plan: Any
) -> dict[str, dict[str, float]]:
    """Feed the following tokens one by one under every budget at once, as one batch.

    Returns per mode the fidelity and the keys read per KV head and token.
    """
    retrieval = Retrieval(threads=torch.get_num_threads())
    runner = Runner(model, retrieval, clock=time.monotonic)
    sequences = [Sequence(model, context, budget=b, plan=plan) for b in MODES.values()]
    sums = [Fidelity() for _ in MODES]
    started = time.monotonic()
    for count, token in enumerate(passage.next_ids.tolist()):
        logits = runner.run_tokens(sequences, [token] * len(sequences))
        for fidelity, row in zip(sums, logits, strict=True):
            fidelity.add(row, oracle[count])
        print(f"\rtoken {count + 1} ", end="", file=sys.stderr)
    seconds, cost = time.monotonic() - started, sequences[0].cost
    print(
        f"\na step of {len(MODES)} sequences: {seconds / cost.steps * 1e3:.0f} ms, "
        f"of it middle {cost.middle_s / cost.steps * 1e3:.0f} ms and attention on the device "
        f"{cost.device_s / cost.steps * 1e3:.0f} ms; mass estimated "
        f"{cost.mass_estimated / cost.steps:.4f}",
        file=sys.stderr,
    )
    reads = cost.steps * model.shape.layers * model.shape.kv_heads
    return {
        mode: {**fidelity.means(), "keys_read": round(sequence.cost.keys_read / reads, 2)}
        for mode, fidelity, sequence in zip(MODES, sums, sequences, strict=True)
    }


class FullAttention:
    """A handler that keeps every key and value: full attention, token by token."""

    def __init__(self, layers: int) -> None:
        self._keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(layers)]
        self._length = [0] * layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
        """Attend causally to all rows so far; buffers have room for what is to come."""
        rows = k.shape[2]
        if self._length[layer] == 0:
            room = (1, k.shape[1], rows + 4096)
            self._keys[layer] = [torch.empty((*room, k.shape[3]), dtype=k.dtype)]
            self._values[layer] = [torch.empty((*room, v.shape[3]), dtype=v.dtype)]
        stop = self._length[layer] + rows
        keys, values = self._keys[layer][0], self._values[layer][0]
        keys[:, :, self._length[layer] : stop] = k
        values[:, :, self._length[layer] : stop] = v
        self._length[layer] = stop
        if stop == rows:
            return causal_attention(q, k, v, scaling=scaling)
        partial = attend_keys(q[0], keys[0, :, :stop], values[0, :, :stop], scaling=scaling)
        return partial.out.unsqueeze(0).to(q.dtype)


def token_by_token(model: Model, passage: Passage, oracle: Tensor) -> dict[str, float]:
    """Return the fidelity of full attention to itself when each token is a step of its own."""
    handler, noise = FullAttention(model.shape.layers), Fidelity()
    with torch.inference_mode():
        feed, first = torch.from_numpy(passage.context_ids.astype(np.int64)), 0
        for count, token in enumerate([None, *passage.next_ids.tolist()]):
            ids = feed if token is None else torch.tensor([token])
            positions = torch.arange(first, first + len(ids)).unsqueeze(0)
            logits = model.module(
                input_ids=ids.unsqueeze(0),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                openbook=handler,
            ).logits[0, -1]
            first += len(ids)
            if token is not None:
                noise.add(logits, oracle[count - 1])
    return noise.means()


def one_block(model: Model, passage: Passage) -> Tensor:
    """Return the log-probabilities of transformers' own attention, one forward over everything."""
    ids = np.concatenate([passage.context_ids, passage.next_ids]).astype(np.int64)
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = module(
            input_ids=torch.from_numpy(ids).unsqueeze(0),
            use_cache=False,
            logits_to_keep=len(passage.next_ids),
        ).logits[0]
    module.set_attn_implementation(NAME)
    oracle: Tensor = logits.log_softmax(-1)
    return oracle


def main() -> None:
    """Measure and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--offset", type=int, default=0, help="characters to skip")
    parser.add_argument("--tokens", type=int, default=7400)
    parser.add_argument("--predict", type=int, default=512)
    parser.add_argument("--plan", choices=["clusters", "scan", "graph"])
    parser.add_argument("--model")
    parser.add_argument("--layout", default="completion")
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
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
        layout=arguments.layout,
        kv_dtype=arguments.kv_dtype,
        threads=arguments.threads,
        plan=arguments.plan,
    )
    oracle = one_block(model, passage)
    with tempfile.TemporaryDirectory() as root:
        path = read_passage(model, passage, Path(root), settings)
        context = OpenContexts(model, clock=time.monotonic).open(path, path.name)
        results = budgeted(model, context, passage, oracle, plan=arguments.plan)
        context.close()
    results["noise"] = token_by_token(model, passage, oracle)
    print(f"{len(passage.context_ids)} context tokens, {arguments.predict} predicted")
    print(f"{'':12} {'agreement':>9} {'KL':>10} {'keys read':>9}")
    for mode, row in results.items():
        print(
            f"{mode:12} {row['agreement']:9.4f} {row['kl']:10.6f} "
            f"{row.get('keys_read', float('nan')):9.1f}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
