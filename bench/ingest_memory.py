"""The peak memory of an ingest against that of a bare forward of the same tokens.

    python bench/ingest_memory.py --text FILE --tokens 8000

Each runs in a fresh process; the peak (VmHWM) is reset once the model is loaded, so that loading is
counted in neither. The promise: ingest ≤ forward + two layers of the context + 64 MB. The last line
is one JSON object, sizes in bytes; the exit code is 1 when the promise is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from openbook.client.demo_model import demo_model
from openbook.indexstore.store import begin
from openbook.worker import IngestSettings, Model, ingest, load_model
from openbook.worker.tokens import document_tokens

ALLOWANCE_BYTES = 64 << 20


def peak_bytes() -> int:
    """Return the peak resident memory since the last reset (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not report VmHWM")


def reset_peak() -> None:
    """Make the present size the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def cut_document(model: Model, text: str, tokens: int) -> bytes:
    """Return the start of a text, of about `tokens` tokens."""
    encoding = model.vocabulary.plain.encode(text[: tokens * 12], add_special_tokens=False)
    if len(encoding.ids) < tokens:
        raise SystemExit(f"the text has only {len(encoding.ids)} tokens")
    return text[: encoding.offsets[tokens - 1][1]].encode()


def run_forward(model: Model, document: bytes) -> None:
    """Run the model without its head over the document, with transformers' own attention."""
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    ids = torch.from_numpy(document_tokens(model, document, "completion").ids).long()
    with torch.inference_mode():
        model.base(input_ids=ids.unsqueeze(0), use_cache=False)


def run_ingest(model: Model, document: bytes) -> None:
    """Ingest the document into a draft that is thrown away."""
    settings = IngestSettings("completion", threads=torch.get_num_threads())
    with tempfile.TemporaryDirectory() as root, begin(Path(root)) as draft:
        manifest = ingest(
            model,
            document,
            draft,
            context_id="measured",
            settings=settings,
            on_progress=lambda _: None,
            is_cancelled=lambda: False,
        )
        print(manifest.stages_s, file=sys.stderr)


def measure(arguments: argparse.Namespace) -> None:
    """Run one of both in this process and print its peak."""
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model or demo_model())
    document = cut_document(model, arguments.text.read_text(), arguments.tokens)
    reset_peak()
    before = peak_bytes()
    (run_forward if arguments.only == "forward" else run_ingest)(model, document)
    shape = model.shape
    row = shape.kv_heads * (shape.head_dim + shape.value_dim)
    print(
        json.dumps(
            {
                "before": before,
                "peak": peak_bytes(),
                "layer": row * arguments.tokens * model.module.dtype.itemsize,
                "tokens": arguments.tokens,
            }
        )
    )


def main() -> int:
    """Run both in fresh processes and compare."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=["forward", "ingest"], help="run one, in this process")
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments)
        return 0
    found = {}
    for kind in ("forward", "ingest"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    forward, ingested = found["forward"], found["ingest"]
    allowed = forward["peak"] + 2 * forward["layer"] + ALLOWANCE_BYTES
    result = {
        "tokens": arguments.tokens,
        "forward_peak": forward["peak"],
        "ingest_peak": ingested["peak"],
        "model_loaded": forward["before"],
        "layer": forward["layer"],
        "allowed": allowed,
        "margin": allowed - ingested["peak"],
    }
    print(json.dumps(result))
    return 0 if result["margin"] >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
