"""A planted fact, asked for as a continuation, under the default budget.

    python bench/needle.py --text FILE [--lengths 2000,4000,7800] [--seeds 2] [--plan graph]

"The secret code of the golden vault is 4071925." stands somewhere in a real text of n tokens.
Asked is "The secret code of the golden vault is": the question reads the middle exactly, the digits
after the first are decoded under the budget. Counted is a needle whose seven digits all are the
model's greedy choice. Beside it: full attention over the same tokens, the gap between both
log-likelihoods of the answer, and a negative control that reads the window alone.

Depths say where in the n tokens it stands, between two sentences. With --borders also needles whose
last digit is at position 127, 128, n - 513 and n - 512. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fidelity import CHARACTERS_PER_TOKEN_MAX, Passage, one_block, read_passage
from numpy.typing import NDArray

from openbook.client.demo_model import demo_model
from openbook.indexstore.head import Budget
from openbook.worker import IngestSettings, Model, load_model
from openbook.worker.decode import Runner, Sequence
from openbook.worker.opened import OpenContexts
from openbook.worker.retrieval import Retrieval
from openbook.worker.tokens import document_tokens, question_tokens
from openbook.worker.window import middle_range

QUESTION = "The secret code of the golden vault is"
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
LAYOUT = "completion"
WINDOW_ONLY = Budget(keys=0, estimate=False)


@dataclass(frozen=True)
class Needle:
    """A document with a planted fact, and where its tokens are."""

    label: str
    document: bytes
    tokens: int
    first: int  # position of the needle's first token
    last: int  # of its last digit
    code: str

    @property
    def is_in_middle(self) -> bool:
        """Whether the code lies outside the window: its digits are all that counts."""
        middle = middle_range(self.tokens)
        return self.last - len(self.code) + 1 in middle and self.last in middle


def plant_at(model: Model, text: str, tokens: int, *, code: str, label: str, at: int) -> Needle:
    """Plant a needle whose last digit is at position `at` in a document of `tokens` tokens.

    It may stand in the middle of a sentence. Where the seams tokenise otherwise, both cuts move a
    little.
    """
    filler = model.vocabulary.plain.encode(text, add_special_tokens=False).offsets
    for before in range(max(0, at - 24), at):
        needle = plant(model, text, filler, tokens, code=code, label=label, before=before)
        if needle is not None and needle.last == at:
            return needle
    raise SystemExit(f"no place for a needle that ends at {at} of {tokens} tokens")


def plant_near(model: Model, text: str, tokens: int, *, code: str, label: str, at: int) -> Needle:
    """Plant a needle between two sentences of the text, as near to token `at` as there is one."""
    filler = model.vocabulary.plain.encode(text, add_special_tokens=False).offsets
    ends = [i for i, (start, _) in enumerate(filler) if text[:start].rstrip()[-1:] in (".", "?")]
    for before in sorted(ends, key=lambda i: abs(i - at)):
        needle = plant(model, text, filler, tokens, code=code, label=label, before=before)
        if needle is not None:
            return needle
    raise SystemExit(f"no place between two sentences for a needle in {tokens} tokens")


def plant(
    model: Model,
    text: str,
    filler: list[tuple[int, int]],
    tokens: int,
    *,
    code: str,
    label: str,
    before: int,
) -> Needle | None:
    """Plant a needle before token `before` of the text; None where the seams do not fit."""
    sentence = f" {QUESTION} {code}"
    start = text[: filler[before][0]] + sentence
    last = len(document_tokens(model, start.encode(), LAYOUT).ids) - 1
    for after in range(before + tokens - last - 12, before + tokens - last + 4):
        end = ".\n" + text[filler[before][0] : filler[max(before, after)][0]]
        found = document_tokens(model, (start + end).encode(), LAYOUT)
        shown = [i for i, (_, b) in enumerate(found.offsets) if b > len(start) - len(sentence)]
        inside = [i for i in shown if found.offsets[i][0] < len(start)]
        if len(found.ids) == tokens and inside and inside[-1] == last:
            return Needle(label, (start + end).encode(), tokens, inside[0], last, code)
    return None


def answer_ids(model: Model, code: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the ids of the question and those of the code behind it."""
    question = question_tokens(model, QUESTION, "", LAYOUT)
    both = question_tokens(model, QUESTION, f" {code}", LAYOUT)
    if both[: len(question)].tolist() != question.tolist():
        raise SystemExit("this tokenizer joins the question and its answer")
    return question, both[len(question) :]


@dataclass(frozen=True)
class Outcome:
    """Whether every id of the code was the greedy choice, and their log-likelihood."""

    is_found: bool
    log_likelihood: float


def judge(log_probabilities: torch.Tensor, answer: NDArray[np.int32]) -> Outcome:
    """Judge log-probabilities (len(answer), vocabulary) that predict the answer's ids."""
    ids = torch.from_numpy(answer.astype(np.int64))
    chosen = log_probabilities.argmax(-1)
    score = log_probabilities.gather(1, ids.unsqueeze(1)).sum()
    return Outcome(bool((chosen == ids).all()), float(score))


def ask(model: Model, sequences: list[Sequence], needle: Needle, threads: int) -> list[Outcome]:
    """Ask behind each sequence's context, feeding the right digits; judge each budget."""
    question, answer = answer_ids(model, needle.code)
    runner = Runner(model, Retrieval(threads=threads), clock=time.monotonic)
    first = [runner.run_block(sequence, question, is_last=True) for sequence in sequences]
    rows = [[logits] for logits in first if logits is not None]
    for token in answer[:-1].tolist():
        logits = runner.run_tokens(sequences, [token] * len(sequences))
        for row, one in zip(rows, logits, strict=True):
            row.append(one)
    return [judge(torch.stack(row).log_softmax(-1), answer) for row in rows]


def ask_window(model: Model, sequence: Sequence, needle: Needle, threads: int) -> Outcome:
    """Ask with the window alone, the question's tokens too: a question reads the middle exactly."""
    question, answer = answer_ids(model, needle.code)
    runner = Runner(model, Retrieval(threads=threads), clock=time.monotonic)
    rows = []
    for token in [*question.tolist(), *answer[:-1].tolist()]:
        rows.append(runner.run_tokens([sequence], [token])[0])
    kept = torch.stack(rows[len(question) - 1 :])
    return judge(kept.log_softmax(-1), answer)


def full_attention(model: Model, needle: Needle) -> Outcome:
    """Ask transformers' own attention, one forward over document, question and answer."""
    question, answer = answer_ids(model, needle.code)
    ids = document_tokens(model, needle.document, LAYOUT).ids
    prompt = np.concatenate([ids, question])
    # Rows predict what follows them: the prompt's last token, then the answer's but its last.
    passage = Passage(b"", prompt[:-1], np.concatenate([prompt[-1:], answer[:-1]]))
    return judge(one_block(model, passage), answer)


def measure(model: Model, needle: Needle, *, plan: Any, threads: int) -> dict[str, Any]:
    """Read the needle's document and ask for it in all ways."""
    passage = Passage(needle.document, np.empty(0, np.int32), np.empty(0, np.int32))
    with tempfile.TemporaryDirectory() as root:
        settings = IngestSettings(LAYOUT, threads=threads, plan=plan)
        path = read_passage(model, passage, Path(root), settings)
        context = OpenContexts(model, clock=time.monotonic).open(path, path.name)
        assert context.token_count == needle.tokens, "planted with the same tokenizer"
        ours = Sequence(model, context, budget=Budget(), plan=plan)
        (found,) = ask(model, [ours], needle, threads)
        blind = Sequence(model, context, budget=WINDOW_ONLY)
        missed = ask_window(model, blind, needle, threads)
        context.close()
    full = full_attention(model, needle)
    return {
        "label": needle.label,
        "tokens": needle.tokens,
        "first": needle.first,
        "last": needle.last,
        "in_middle": needle.is_in_middle,
        "found": found.is_found,
        "full": full.is_found,
        "window_only": missed.is_found,
        "gap": round(full.log_likelihood - found.log_likelihood, 5),
        "log_likelihood": round(found.log_likelihood, 5),
    }


def needles(model: Model, text: str, arguments: argparse.Namespace) -> list[Needle]:
    """Plant all needles that were asked for."""
    planted = []
    for tokens in [int(length) for length in arguments.lengths.split(",")]:
        places = {f"depth {depth}": int(depth * tokens) + 20 for depth in DEPTHS}
        if arguments.borders:
            places |= {f"ends at {at}": at for at in (127, 128)}
            places |= {f"ends at n-{back}": tokens - back for back in (513, 512)}
        if arguments.only_borders:
            places = {label: at for label, at in places.items() if label.startswith("ends")}
        for seed in range(arguments.seeds):
            for label, at in places.items():
                code = "".join(random.Random(f"{seed} {tokens} {label}").choices("0123456789", k=7))
                place = plant_at if label.startswith("ends") else plant_near
                planted.append(place(model, text, tokens, code=code, label=label, at=at))
    return planted


def main() -> None:
    """Measure every needle and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--offset", type=int, default=0, help="characters to skip")
    parser.add_argument("--lengths", default="2000,4000,7800", help="context tokens")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--plan", choices=["clusters", "scan", "graph"])
    parser.add_argument("--borders", action="store_true", help="also at the window's borders")
    parser.add_argument("--only-borders", action="store_true", help="with --borders, no depths")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model or demo_model())
    longest = max(int(length) for length in arguments.lengths.split(","))
    text = arguments.text.read_text()[arguments.offset :][: longest * CHARACTERS_PER_TOKEN_MAX]
    rows = []
    for needle in needles(model, text, arguments):
        row = measure(model, needle, plan=arguments.plan, threads=arguments.threads)
        rows.append(row)
        print(
            f"{row['tokens']:6} {row['label']:14} found {row['found']!s:5} full {row['full']!s:5} "
            f"window only {row['window_only']!s:5} gap {row['gap']:+.4f}",
            flush=True,
        )
    summary = {
        "needles": len(rows),
        "found": sum(row["found"] for row in rows),
        "full": sum(row["full"] for row in rows),
        "in_middle": sum(row["in_middle"] for row in rows),
        "window_only_found_in_middle": sum(r["window_only"] and r["in_middle"] for r in rows),
        "gap_mean": round(float(np.mean([row["gap"] for row in rows])), 5),
        "gap_max": round(max(row["gap"] for row in rows), 5),
    }
    print(json.dumps({**summary, "rows": rows}), file=sys.stdout)


if __name__ == "__main__":
    main()
