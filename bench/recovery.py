"""Draw the paper's Figure 2 live: how much attention is kept by keys chosen once, and anew.

    python bench/recovery.py --text FILE [--offset CHARS] --tokens 7400 [--ask QUESTION …]
        [--prompt 32] [--generate 20] [--keys 1000 …] [--out FILE.json] [--figure FILE.png]

Reads `--tokens` tokens of a text as a context and runs a prompt behind it: each question, or the
`--prompt` tokens that follow in the text. Then the model generates `--generate` tokens as the
service does, greedily, its own ids fed back; none ends it. For each, of its attention's mass:

    dynamic    what the best `--keys` keys for the token's own query have, by exact scores
    static     what those have that were the best for the prompt's last query
    openbook   what the keys have that the default search read for the token

The mass is the softmax over the keys of the middle alone: window and tail are always read and are
not counted. What clusters stand in for is not counted either. Means over prompts, layers and query
heads, a figure for each token. Prints a table, and as the last line one JSON object. Knows the
worker's modules, not only its face.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")

from fidelity import CHARACTERS_PER_TOKEN_MAX, cut_passage, read_passage
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from openbook.client.demo_model import demo_model
from openbook.indexstore.dtypes import to_float32
from openbook.indexstore.head import AttendRequest, AttendResult, Budget
from openbook.worker.decode import Runner, Sequence
from openbook.worker.ingest import IngestSettings
from openbook.worker.models import Model, load_model
from openbook.worker.opened import OpenContexts, OpenedContext
from openbook.worker.retrieval import Retrieval
from openbook.worker.tokens import question_tokens
from openbook.worker.window import middle_range

OURS = "openbook"
DRAWN = {"dynamic": "#7d3c98", "static": "#c0392b"}  # and the colour of each
OURS_COLOUR = "#1f6f8b"
STYLES = ("-", "--", ":", "-.")  # of each number of keys


class WatchedRetrieval(Retrieval):
    """Answers one session as the service does, and weighs the keys that others would have read."""

    def __init__(self, *, threads: int, counts: Several[int]) -> None:
        """Use up to `threads` threads for each call, and compare the best keys of each count."""
        super().__init__(threads=threads)
        self._counts = counts
        self._chosen: dict[int, NDArray[np.int64]] = {}  # by id(layer): of the prompt's last query
        self.layers: list[dict[str, float]] = []  # what was kept, of each layer of each token

    def attend(self, requests: Several[AttendRequest]) -> list[AttendResult]:
        """Answer the request, and compare what it read if it is a generated token's."""
        (request,) = requests
        (result,) = super().attend([request._replace(evidence=True)])
        logits = middle_logits(request)
        best = best_keys(logits, max(self._counts))
        if request.budget.kind == "exact":
            self._chosen[id(request.layer)] = best
        else:
            chosen = self._chosen[id(request.layer)]
            self.layers.append(compare(logits, best, chosen, self._counts, read=result.ids))
        return [result]


def middle_logits(request: AttendRequest) -> NDArray[np.float64]:
    """Return the logits of the last row's queries to every key of the middle, in text order.

    (query heads, m)
    """
    heads = request.layer.heads
    last = request.queries[:, -1]  # (query heads, d)
    groups = np.split(last, len(heads))  # of (group, d)
    rows = [
        (to_float32(head.in_text_order(head.keys)) @ group.T).T
        for head, group in zip(heads, groups, strict=True)
    ]
    return np.concatenate(rows).astype(np.float64) * request.scaling


def best_keys(logits: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the keys of the highest logits (query heads, m), best first: (query heads, count)."""
    return np.argsort(-logits, axis=1)[:, :count]


def recovered(
    logits: NDArray[np.float64], ids: Several[NDArray[np.int64]] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the share of the mass that each query head's keys `ids` have, (query heads,).

    `logits` (query heads, m) of every key; no id is given twice.
    """
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    kept = [row[own].sum() for row, own in zip(weights, ids, strict=True)]
    shares: NDArray[np.float64] = np.array(kept) / weights.sum(axis=1)
    return shares


def compare(
    logits: NDArray[np.float64],
    best: NDArray[np.int64],
    chosen: NDArray[np.int64],
    counts: Several[int],
    *,
    read: Several[NDArray[np.int64]],
) -> dict[str, float]:
    """Return what each way of choosing keeps in one layer, means over its query heads.

    `best` and `chosen` (query heads, at least max(counts)) are best first, of the token's own query
    and of the prompt's; `read` holds the ids that the search read for each query head.
    """
    kept = {OURS: float(recovered(logits, read).mean())}
    for count in counts:
        kept[f"dynamic {count}"] = float(recovered(logits, best[:, :count]).mean())
        kept[f"static {count}"] = float(recovered(logits, chosen[:, :count]).mean())
    return kept


def generate(
    runner: Runner, sequence: Sequence, prompt: NDArray[np.int32], *, count: int
) -> list[int]:
    """Run the prompt, then `count` tokens, each chosen greedily and fed back; return them."""
    logits = runner.run_block(sequence, prompt, is_last=True)
    assert logits is not None, "logits were asked for"
    ids = []
    for at in range(count):
        ids.append(int(logits.argmax()))
        logits = runner.run_tokens([sequence], ids[-1:])[0]
        print(f"\rtoken {at + 1} ", end="", file=sys.stderr)
    return ids


def measure(
    model: Model,
    context: OpenedContext,
    prompts: Several[NDArray[np.int32]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Generate behind each prompt; return each line's figure per token, its mean, and the sizes."""
    retrieval = WatchedRetrieval(threads=arguments.threads, counts=arguments.keys)
    runner = Runner(model, retrieval, clock=time.monotonic)
    keys_read = 0
    for prompt in prompts:
        sequence = Sequence(model, context, budget=Budget())
        ids = generate(runner, sequence, prompt, count=arguments.generate)
        text = model.vocabulary.marked.decode(ids, skip_special_tokens=False)
        print(repr(text), file=sys.stderr)
        keys_read += sequence.cost.keys_read
    shape = model.shape
    middle = len(middle_range(context.token_count))
    steps = len(prompts) * arguments.generate * shape.layers * shape.kv_heads
    by_name = {
        name: np.array([layer[name] for layer in retrieval.layers])
        .reshape(len(prompts), arguments.generate, shape.layers)
        .mean(axis=(0, 2))
        for name in retrieval.layers[0]
    }
    return {
        "tokens": context.token_count,
        "middle": middle,
        "prompts": len(prompts),
        "keys": arguments.keys,
        "keys_of_middle": [round(count / middle, 4) for count in arguments.keys],
        "keys_read": round(keys_read / steps, 1),  # of a KV head at a token, by the default search
        "keys_read_of_middle": round(keys_read / steps / middle, 4),
        "mean": {name: round(float(line.mean()), 5) for name, line in by_name.items()},
        "recovered": {name: np.round(line, 5).tolist() for name, line in by_name.items()},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the lines, one figure per generated token."""
    figure, axes = pyplot.subplots(figsize=(8, 4), constrained_layout=True)
    tokens = np.arange(1, len(found["recovered"][OURS]) + 1)
    shares = zip(found["keys"], found["keys_of_middle"], STYLES, strict=False)
    for count, share, style in shares:
        for way, colour in DRAWN.items():
            axes.plot(
                tokens, found["recovered"][f"{way} {count}"], style, marker="o", markersize=3,
                color=colour, label=f"{way} top {count:,} ({share:.1%})",
            )  # fmt: skip
    axes.plot(
        tokens, found["recovered"][OURS], marker="o", markersize=3, color=OURS_COLOUR,
        label=f"openbook, {found['keys_read']:,.0f} a KV head ({found['keys_read_of_middle']:.1%})",
    )  # fmt: skip
    axes.set_title(f"Attention kept, {found['middle']:,} keys of the middle")
    axes.set_xlabel("generated token")
    axes.set_ylabel("share of the middle's mass")
    axes.set_ylim(top=1.005)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--offset", type=int, default=0, help="characters to skip")
    parser.add_argument("--tokens", type=int, default=7400)
    parser.add_argument("--ask", action="append", default=[], metavar="QUESTION")
    parser.add_argument("--prompt", type=int, default=32, help="tokens, where nothing is asked")
    parser.add_argument("--generate", type=int, default=20)
    parser.add_argument("--keys", type=int, nargs="+", default=[1000])
    parser.add_argument("--model")
    parser.add_argument("--layout", default="completion")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--figure", type=Path, help="also draw the lines here")
    arguments = parser.parse_args()
    if not 0 < min(arguments.keys) <= max(arguments.keys) <= len(middle_range(arguments.tokens)):
        parser.error("--keys must be of the middle, which is all but 640 of --tokens")
    if len(arguments.keys) > len(STYLES):
        parser.error(f"--keys takes {len(STYLES)} numbers at most")
    if arguments.prompt < 1 or arguments.generate < 1:
        parser.error("--prompt and --generate must be at least 1")
    return arguments


def main() -> None:
    """Measure, and print the table and the JSON line."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model or demo_model())
    wanted = (arguments.tokens + arguments.prompt) * CHARACTERS_PER_TOKEN_MAX
    passage = cut_passage(
        model,
        arguments.text.read_text()[arguments.offset :][:wanted],
        layout=arguments.layout,
        context_tokens=arguments.tokens,
        next_tokens=arguments.prompt,
    )
    asked = [question_tokens(model, ask, "", arguments.layout) for ask in arguments.ask]
    settings = IngestSettings(layout=arguments.layout, threads=arguments.threads)
    with tempfile.TemporaryDirectory() as root:
        path = read_passage(model, passage, Path(root), settings)
        context = OpenContexts(model, clock=time.monotonic).open(path, path.name)
        found = measure(model, context, asked or [passage.next_ids], arguments)
        context.close()
    print("token", *(f"{name:>13}" for name in found["recovered"]))
    for at, row in enumerate(zip(*found["recovered"].values(), strict=True)):
        print(f"{at + 1:5}", *(f"{share:13.4f}" for share in row))
    print(" mean", *(f"{share:13.4f}" for share in found["mean"].values()))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.figure:
        draw(found, arguments.figure)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
