"""The time of an ingest against that of a bare forward of the same tokens.

    python bench/ingest_time.py --text FILE [--tokens 32768] [--layers 4] [--rounds 3]

Forward and ingest alternate in one process; the forward is the library's own, without output head
and without a cache. `--layers` keeps the first layers of the model: all layers cost alike, and a
document longer than the model's positions is read all the same, for only the time is asked. The
last line is one JSON object: seconds, and the ratio of both, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ingest_memory import cut_document
from torch import nn

from openbook.client.demo_model import demo_model
from openbook.indexstore.store import StageSeconds, begin
from openbook.worker import IngestSettings, Model, ingest, load_model
from openbook.worker.tokens import document_tokens


def shortened(model: Model, layers: int, positions: int) -> Model:
    """Return the model with its first layers alone, said to have so many positions."""
    base: Any = model.base
    kept = min(layers, model.shape.layers)
    base.layers = nn.ModuleList(list(base.layers)[:kept])
    base.config.num_hidden_layers = kept
    shape = replace(
        model.shape,
        layers=kept,
        positions_max=max(positions, model.shape.positions_max),
        scalings=model.shape.scalings[:kept],
    )
    return replace(model, shape=shape)


def forward_s(model: Model, document: bytes) -> float:
    """Return the seconds of the model without its head, with the library's own attention."""
    module: Any = model.module
    ids = torch.from_numpy(document_tokens(model, document, "completion").ids).long()
    ours = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    try:
        begun = time.perf_counter()
        with torch.inference_mode():
            model.base(input_ids=ids.unsqueeze(0), use_cache=False)
        return time.perf_counter() - begun
    finally:
        module.set_attn_implementation(ours)


def ingest_s(model: Model, document: bytes, threads: int) -> tuple[float, StageSeconds]:
    """Return the seconds of an ingest into a draft that is thrown away, and those of its stages."""
    with tempfile.TemporaryDirectory() as root, begin(Path(root)) as draft:
        begun = time.perf_counter()
        manifest = ingest(
            model,
            document,
            draft,
            context_id="measured",
            settings=IngestSettings("completion", threads=threads),
            on_progress=lambda _: None,
            is_cancelled=lambda: False,
        )
        return time.perf_counter() - begun, manifest.stages_s


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(arguments.model or demo_model())
    model = shortened(loaded, arguments.layers, arguments.tokens + 1)
    document = cut_document(model, arguments.text.read_text(), arguments.tokens)
    rounds: list[tuple[float, float, StageSeconds]] = []
    for _ in range(arguments.rounds):
        rounds.append((forward_s(model, document), *ingest_s(model, document, arguments.threads)))
        print(rounds[-1], file=sys.stderr)
    forwards, ingests, stages = zip(*rounds, strict=True)
    result = {
        "tokens": arguments.tokens,
        "layers": model.shape.layers,
        "forward_s": float(np.median(forwards)),
        "ingest_s": float(np.median(ingests)),
        "build_s": float(np.median([stage.build for stage in stages])),
        "ratio": float(np.median(np.array(ingests) / np.array(forwards))),
    }
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
