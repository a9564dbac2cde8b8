"""The time to the first token without openbook: the document and the question, prefilled again.

Owns the comparison column of the demo: the same weights under transformers' own attention "sdpa"
and its own cache. It shares with the service only how a model is loaded and text is tokenised.

    python -m openbook.worker.baseline --model M --document FILE --question TEXT

prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openbook.worker.models import Model, load_model
from openbook.worker.tokens import CHAT, document_tokens, question_tokens


def first_token(model: Model, prompt: list[int]) -> tuple[int, float]:
    """Prefill the whole prompt and return the first greedy id and the seconds it took."""
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt], device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        chosen = int(logits[0, -1].argmax())  # waits for the device
    return chosen, time.perf_counter() - started


def main() -> None:
    """Measure once and print {"prompt_tokens":, "first_token_ms":, …}."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="Hugging Face id, directory or .gguf file")
    parser.add_argument("--document", required=True, type=Path)
    parser.add_argument("--question", required=True)
    parser.add_argument("--answer-prefix", default="")
    parser.add_argument("--layout", default=CHAT, help="prompt layout: chat or completion")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    document = document_tokens(model, arguments.document.read_bytes(), arguments.layout)
    question = question_tokens(model, arguments.question, arguments.answer_prefix, arguments.layout)
    prompt = np.concatenate([document.ids, question]).tolist()
    first_token(model, prompt[: min(8, len(prompt))])  # the first call also pays for set-up
    chosen, seconds = first_token(model, prompt)
    print(
        json.dumps(
            {
                "prompt_tokens": len(prompt),
                "first_token_ms": round(seconds * 1e3, 1),
                "first_token": model.vocabulary.marked.decode([chosen]),
                "attention": "sdpa",
                "threads": arguments.threads,
            }
        )
    )


if __name__ == "__main__":
    main()
