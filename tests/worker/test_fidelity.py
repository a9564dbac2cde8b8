"""Claims about budgets with the real demo model, whose heads are what the estimate is for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openbook.indexstore.attend import attend
from openbook.indexstore.head import EXACT, AttendRequest, Budget, LayerIndex
from openbook.worker.attention import NAME
from openbook.worker.decode import Runner, Sequence
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext
from openbook.worker.retrieval import Retrieval
from openbook.worker.tokens import document_tokens, question_tokens

pytestmark = pytest.mark.slow

ReadContext = Callable[..., Path]
LAYOUT = "completion"
KEEPERS = ("lamp", "boat", "rope", "gull", "stair", "door", "coat", "clock", "stove", "chart")
FACT = "The pass key is"


def story(words: int, seed: int = 0) -> str:
    """Return plain sentences that never repeat exactly; a deterministic filler."""
    rng = np.random.default_rng(seed)
    sentences = []
    for day in range(words):
        first, second, third = rng.choice(KEEPERS, 3, replace=False)
        sentences.append(
            f" On day {day} the keeper took the {first} past the {second}, "
            f"and {rng.integers(10, 99)} birds sat on the {third}."
        )
    return "".join(sentences)


Opened = Callable[[Model, Path], OpenedContext]


def full_log_probabilities(model: Model, ids: np.ndarray, count: int) -> torch.Tensor:
    """Return what transformers' own attention predicts after each of the last `count` ids."""
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    rows = torch.from_numpy(ids.astype(np.int64)).unsqueeze(0)
    with torch.inference_mode():
        logits = module(input_ids=rows, use_cache=False, logits_to_keep=count).logits[0]
    module.set_attn_implementation(NAME)
    return torch.log_softmax(logits, -1)


def test_the_estimate_is_worth_more_than_dropping_the_rest(
    smollm2: Model, read_context: ReadContext, opened: Opened
) -> None:
    text, predict = story(70), 48
    whole = document_tokens(smollm2, text.encode(), LAYOUT)
    cut = len(whole) - predict
    document = text[: whole.offsets[cut][0]].encode()
    assert document_tokens(smollm2, document, LAYOUT).ids.tolist() == whole.ids[:cut].tolist()
    context = opened(smollm2, read_context(smollm2, document, kv_dtype="float16"))
    budgets = [Budget(), Budget(estimate=False), Budget(keys=0, estimate=False)]
    sequences = [Sequence(smollm2, context, budget=budget) for budget in budgets]
    runner = Runner(smollm2, Retrieval(threads=2), clock=time.monotonic)
    oracle = full_log_probabilities(smollm2, whole.ids, predict)
    kl, agreed = np.zeros(3), np.zeros(3)
    for token, want in zip(whole.ids[cut:].tolist(), oracle, strict=True):
        rows = runner.run_tokens(sequences, [token] * 3).log_softmax(-1)
        kl += (want.exp() * (want - rows)).sum(-1).numpy() / predict
        agreed += (rows.argmax(-1) == want.argmax(-1)).numpy() / predict
    assert kl[0] < 0.0012 and agreed[0] >= 0.97
    assert kl[0] < kl[1] < kl[2]


# Where the fact's last digit stands; the window's borders are at 128 and n - 512.
PLACES = [40, 127, 128, 129, 700, -514, -513, -512, -511, -20]


@pytest.mark.parametrize("place", PLACES)
def test_case_b07_a_fact_is_found_wherever_it_stands(
    place: int, smollm2: Model, read_context: ReadContext, opened: Opened
) -> None:
    tokens = 1400
    at = place % tokens
    document = planted(smollm2, at, tokens)
    context = opened(smollm2, read_context(smollm2, document, kv_dtype="float16"))
    assert context.token_count == tokens
    question = question_tokens(smollm2, FACT, "", LAYOUT)
    answer = question_tokens(smollm2, FACT, " 71432", LAYOUT)[len(question) :]
    runner = Runner(smollm2, Retrieval(threads=2), clock=time.monotonic)
    sequence = Sequence(smollm2, context, budget=Budget())
    logits = runner.run_block(sequence, question, is_last=True)
    assert logits is not None
    rows = [logits, *(runner.run_tokens([sequence], [t])[0] for t in answer[:-1].tolist())]
    prompt = document_tokens(smollm2, document, LAYOUT).ids
    full = full_log_probabilities(
        smollm2, np.concatenate([prompt, question, answer[:-1]]), len(answer)
    )
    assert torch.stack(rows).argmax(-1).tolist() == full.argmax(-1).tolist()
    assert found_share(context, at) >= 0.95


def planted(model: Model, at: int, tokens: int) -> bytes:
    """Return a text of exactly `tokens` tokens whose fact ends at position `at`."""
    filler = story(100)
    offsets = document_tokens(model, filler.encode(), LAYOUT).offsets
    for before in range(max(0, at - 14), at):
        start = filler[: offsets[before][0]] + f" {FACT} 71432"
        if len(document_tokens(model, start.encode(), LAYOUT)) - 1 != at:
            continue
        for after in range(before + tokens - at - 12, before + tokens - at + 4):
            end = "." + filler[offsets[before][0] : offsets[max(before, after)][0]]
            if len(document_tokens(model, (start + end).encode(), LAYOUT)) == tokens:
                return (start + end).encode()
    raise AssertionError(f"no text of {tokens} tokens with the fact at {at}")


def found_share(context: OpenedContext, at: int) -> float:
    """Return how often a position in an exact top 100 is found, over all stored probes.

    Counted are the positions around `at` that lie in the middle, so that a border off by one shows.
    """
    wanted = found = 0
    stored = context._held().stored
    for number, plan in enumerate(context.manifest.plan):
        layer = stored.layer(number)
        for probe in range(layer.probe_queries.shape[1]):
            queries = np.ascontiguousarray(layer.probe_queries[:, probe : probe + 1])
            scaling, heads = context.manifest.scaling[number], layer.heads
            every, found_by_plan = attend(
                [
                    AttendRequest(LayerIndex(heads, plan), queries, scaling, budget, evidence=True)
                    for budget in (EXACT, Budget())
                ]
            )
            for ids, logits, got in zip(every.ids, every.logits, found_by_plan.ids, strict=True):
                best = ids[np.argsort(-logits)[:100]]
                near = best[np.abs(best + 128 - at) <= 20]
                wanted += len(near)
                found += int(np.isin(near, got).sum())
    return found / wanted if wanted else 1.0
