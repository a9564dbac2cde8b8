"""Claims that answers equal transformers' own full attention of the same weights.

The oracle is the model's own code with attention "sdpa" and its DynamicCache. Ours runs on the
oracle's ids: if the greedy choice is the same after every one of them, free running gives the same
ids too, and the logits are compared at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from openbook.indexstore.build import IndexParams, build_head
from openbook.indexstore.graph import reachable_keys
from openbook.indexstore.head import EXACT, Budget, LayerIndex, PlanKind
from openbook.indexstore.plan import untuned_plan
from openbook.worker import decode, window
from openbook.worker.capture import exact_top_k
from openbook.worker.decode import BLOCK_TOKENS, Runner, Sequence, Step
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext
from openbook.worker.retrieval import Retrieval
from openbook.worker.window import Window

LENGTHS = [1, 2, 127, 128, 129, 511, 512, 513, 639, 640, 641, 642, 741, 742, 3000]
# With every kind of model only the lengths with no, one and many keys in the middle are quick.
SOME_LENGTHS = [
    n if n in (129, 641, 3000) else pytest.param(n, marks=pytest.mark.slow) for n in LENGTHS
]
HEADS = [(9, 3), (32, 8), (12, 12)]
ANSWER_IDS = 48
TIE_GAP = 1e-4  # two ids of the oracle closer than this may swap
LOGITS_BOUND = 1e-3

Tiny = Callable[..., Model]
TinyDirectory = Callable[..., Path]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


@dataclass(frozen=True)
class Oracle:
    """What full attention says: ids chosen greedily and the logits (steps, vocabulary)."""

    ids: list[int]
    logits: torch.Tensor


@lru_cache
def own_model(directory: Path) -> Any:
    """Load a model as transformers alone would run it."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()


def ask_oracle(directory: Path, prompt: list[int], count: int) -> Oracle:
    """Generate greedily with transformers' own attention and cache, ends ignored."""
    own = own_model(directory)
    cache = DynamicCache(config=own.config)
    ids, rows, feed = [], [], torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            logits = own(feed, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            rows.append(logits)
            ids.append(int(logits.argmax()))
            feed = torch.tensor([[ids[-1]]])
    return Oracle(ids, torch.stack(rows))


def our_logits(
    model: Model,
    context: OpenedContext,
    question: np.ndarray,
    answer: list[int],
    *,
    budget: Budget = EXACT,
    plan: PlanKind | None = None,
    spy: Callable[[Sequence], None] = lambda _: None,
) -> torch.Tensor:
    """Run a question and then given answer ids; return logits (len(answer), vocabulary)."""
    runner = Runner(model, Retrieval(threads=1), clock=time.monotonic)
    sequence = Sequence(model, context, budget=budget, plan=plan)
    rows = []
    for first in range(0, len(question), BLOCK_TOKENS):
        block = question[first : first + BLOCK_TOKENS]
        is_last = first + len(block) == len(question)
        logits = runner.run_block(sequence, block, is_last=is_last)
        spy(sequence)
    assert logits is not None
    rows.append(logits)
    for token in answer[:-1]:
        rows.append(runner.run_tokens([sequence], [token])[0])
        spy(sequence)
    return torch.stack(rows)


def assert_same(ours: torch.Tensor, oracle: Oracle) -> None:
    """Compare every step: the greedy id, ties of the oracle listed and let pass, and the logits."""
    top = oracle.logits.topk(2, dim=-1).values
    for step, (mine, theirs) in enumerate(zip(ours.argmax(-1).tolist(), oracle.ids, strict=True)):
        gap = float(top[step, 0] - top[step, 1])
        if mine != theirs and gap < TIE_GAP:
            print(f"step {step}: {mine} for {theirs}, a tie of the oracle ({gap:.1e})")
            continue
        assert mine == theirs, f"step {step}: {mine} for {theirs}, gap {gap:.1e}"
    assert float((ours - oracle.logits).abs().max()) < LOGITS_BOUND


Opened = Callable[[Model, Path], OpenedContext]
QUESTION = np.array([11, 200, 13, 77, 5, 301, 42], dtype=np.int32)


def _question(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(3, 500, count).astype(np.int32)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("token_count", LENGTHS)
def test_case_b01_ids_equal_full_attention_at_every_length(
    token_count: int,
    heads: tuple[int, int],
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
) -> None:
    model = tiny_model("llama", *heads)
    context = opened(model, read_context(model, digits(token_count)))
    assert context.token_count == token_count
    assert all(bool(layer.heads) == (token_count > 640) for layer in context.layers)
    prompt = [*_context_ids(model, digits(token_count)), *QUESTION.tolist()]
    oracle = ask_oracle(tiny_directory("llama", *heads), prompt, ANSWER_IDS)
    assert_same(our_logits(model, context, QUESTION, oracle.ids), oracle)


def _context_ids(model: Model, document: bytes) -> list[int]:
    ids: list[int] = model.vocabulary.plain.encode(document.decode()).ids
    return ids


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2"])
@pytest.mark.parametrize("token_count", SOME_LENGTHS)
def test_ids_equal_full_attention_for_every_kind_of_model(
    kind: str,
    token_count: int,
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
) -> None:
    model = tiny_model(kind)
    context = opened(model, read_context(model, digits(token_count)))
    prompt = [*_context_ids(model, digits(token_count)), *QUESTION.tolist()]
    oracle = ask_oracle(tiny_directory(kind), prompt, ANSWER_IDS)
    assert_same(our_logits(model, context, QUESTION, oracle.ids), oracle)


@pytest.mark.parametrize(("question_tokens", "answer_tokens"), [(700, ANSWER_IDS), (20, 600)])
def test_long_questions_and_answers_equal_full_attention(
    question_tokens: int,
    answer_tokens: int,
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
) -> None:
    model, question = tiny_model("llama", 9, 3), _question(question_tokens)
    context = opened(model, read_context(model, digits(3000)))
    prompt = [*_context_ids(model, digits(3000)), *question.tolist()]
    oracle = ask_oracle(tiny_directory("llama", 9, 3), prompt, answer_tokens)
    assert_same(our_logits(model, context, question, oracle.ids), oracle)


@pytest.mark.parametrize(("token_count", "middle"), [(641, 1), (642, 2), (740, 100), (741, 101)])
def test_case_b02_more_keys_asked_for_than_there_are(
    token_count: int,
    middle: int,
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
) -> None:
    model = tiny_model("llama", 9, 3)
    context = opened(model, read_context(model, digits(token_count)))
    prompt = [*_context_ids(model, digits(token_count)), *QUESTION.tolist()]
    oracle = ask_oracle(tiny_directory("llama", 9, 3), prompt, 16)
    read: list[int] = []
    budget = Budget(keys=100, estimate=False)
    ours = our_logits(
        model,
        context,
        QUESTION,
        oracle.ids,
        budget=budget,
        spy=lambda sequence: read.append(sequence.cost.keys_read),
    )
    steps_heads = 15 * 2 * 3
    assert min(100, middle) * steps_heads <= read[-1] <= middle * steps_heads
    if middle <= 100:
        assert_same(ours, oracle)


def test_case_b03_every_position_is_read_once_behind_a_long_question(
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
) -> None:
    shape = {"max_position_embeddings": 8192}
    model, question = tiny_model("llama", 9, 3, **shape), _question(700)
    context = opened(model, read_context(model, digits(5000)))
    prompt = [*_context_ids(model, digits(5000)), *question.tolist()]
    oracle = ask_oracle(tiny_directory("llama", 9, 3, **shape), prompt, 32)

    def covered(sequence: Sequence) -> None:
        parts = [np.asarray(part) for part in sequence.partition()]
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(sequence.position))
        assert sequence.layers[0].heads[0].middle_tokens == len(parts[1])
        assert sequence.window.keys[1].shape[1] == len(parts[0])

    assert_same(our_logits(model, context, question, oracle.ids, spy=covered), oracle)


@pytest.mark.parametrize(
    "document", [b" the" * 3000, b"17:03 node 7: disk full\n" * 120], ids=["one word", "one line"]
)
def test_case_b19_a_document_that_repeats_itself(
    document: bytes,
    tiny_model: Tiny,
    tiny_directory: TinyDirectory,
    read_context: ReadContext,
    opened: Opened,
) -> None:
    model = tiny_model("llama", 9, 3)
    context = opened(model, read_context(model, document, plan="graph"))
    assert context.token_count > 1000
    for head in (head for layer in context.layers for head in layer.heads):
        assert reachable_keys(head.graph, int(head.entries[0])) == head.middle_tokens
    prompt = [*_context_ids(model, document), *QUESTION.tolist()]
    oracle = ask_oracle(tiny_directory("llama", 9, 3), prompt, 12)
    exact = our_logits(model, context, QUESTION, oracle.ids)
    assert_same(exact, oracle)
    # Keys nearly the same cannot be told apart: what is lacking is what the estimate lacks.
    for plan in get_args(PlanKind):
        found = our_logits(model, context, QUESTION, oracle.ids, budget=Budget(), plan=plan)
        assert float((found - exact).abs().max()) < (0.15 if plan == "clusters" else 0.3)


def test_case_b09_question_as_one_block_or_token_by_token(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits, opened: Opened
) -> None:
    model, question = tiny_model("llama", 9, 3), _question(20)
    context = opened(model, read_context(model, digits(2000)))
    runner = Runner(model, Retrieval(threads=1), clock=time.monotonic)
    whole, single = (Sequence(model, context, budget=EXACT) for _ in range(2))
    block = runner.run_block(whole, question, is_last=True)
    for at in range(20):
        row = runner.run_block(single, question[at : at + 1], is_last=True)
    assert block is not None and row is not None
    assert float((block - row).abs().max()) < LOGITS_BOUND


def test_case_b09_a_question_token_sees_those_before_and_none_after(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits, opened: Opened
) -> None:
    model = tiny_model("llama", 9, 3)
    context = opened(model, read_context(model, digits(700)))
    runner = Runner(model, Retrieval(threads=1), clock=time.monotonic)

    def second_row(ids: list[int]) -> torch.Tensor:
        """Return the last layer's keys of token 1: they hold what it attended to before."""
        sequence = Sequence(model, context, budget=EXACT)
        runner.run_block(sequence, np.array(ids, np.int32), is_last=True)
        keys, _ = sequence.tail.append(1, torch.zeros(3, 0, 16), torch.zeros(3, 0, 16))
        return keys[:, 1].clone()

    plain = second_row([11, 200, 13])
    assert torch.allclose(plain, second_row([11, 200, 400]), atol=1e-6)
    assert float((plain - second_row([12, 200, 13])).abs().max()) > 1e-3


def test_only_window_and_tail_rows_reach_the_device(
    tiny_model: Tiny,
    read_context: ReadContext,
    digits: Digits,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every array that becomes a tensor is seen; keys and values come through one gate."""
    model = tiny_model("llama", 9, 3)
    path = read_context(model, digits(3000))
    crossed: list[tuple[int, ...]] = []
    genuine = torch.from_numpy

    def spy(array: np.ndarray) -> torch.Tensor:
        crossed.append(array.shape)
        return genuine(array)

    monkeypatch.setattr(torch, "from_numpy", spy)
    context = opened(model, path)
    assert crossed == [(3, 640, 16)] * 4  # keys and values of two layers
    assert context.window.rows_moved == [640, 640]
    crossed.clear()
    our_logits(model, context, QUESTION, [5, 6, 7], budget=Budget())
    rows = [(QUESTION.shape[0],)]  # the question's ids
    for count in (len(QUESTION), 1, 1):
        rows += [(9, count, 16), (9, count)] * 2  # what the middle answered, per layer
    assert crossed == rows
    assert window.rows_to_device.__module__ == "openbook.worker.window"
    assert "rows_to_device" not in vars(decode)


def test_budgets_agree_when_all_keys_are_read(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits, opened: Opened
) -> None:
    """Reading every key under a `keys` budget is the exact budget: the estimate adds nothing."""
    model = tiny_model("qwen3")
    context = opened(model, read_context(model, digits(1500)))
    answer = _question(20).tolist()
    exact = our_logits(model, context, QUESTION, answer)
    everything = our_logits(model, context, QUESTION, answer, budget=Budget(keys=5000))
    assert float((exact - everything).abs().max()) < LOGITS_BOUND


def test_a_float16_store_stays_close_to_float32(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits, opened: Opened
) -> None:
    model, answer = tiny_model("llama", 9, 3), _question(20).tolist()
    half, full = (
        our_logits(
            model, opened(model, read_context(model, digits(900), kv_dtype=kind)), QUESTION, answer
        )
        for kind in ("float16", "float32")
    )
    difference = float((half - full).abs().max())
    assert 0 < difference < 0.05


@dataclass
class NumberedContext:
    """A context of `token_count` tokens whose every value is its KV head's number."""

    token_count: int
    window: Window
    layers: tuple[LayerIndex, ...]


@pytest.mark.parametrize("heads", [(9, 3), (32, 8), (28, 4), (12, 12)])
@pytest.mark.parametrize("budget", [EXACT, Budget(keys=10), Budget(keys=10, estimate=False)])
def test_case_b10_every_part_maps_query_heads_alike(
    heads: tuple[int, int], budget: Budget, tiny_model: Tiny
) -> None:
    """Query head h gets h // group out of window, middle and tail alike, merged."""
    query_heads, kv_heads = heads
    model, rng = tiny_model("llama", *heads), np.random.default_rng(0)
    numbers = np.arange(kv_heads, dtype=np.float32)
    keys = rng.standard_normal((kv_heads, 1000, 16)).astype(np.float32)
    values = np.broadcast_to(numbers[:, None, None], keys.shape).copy()
    middle = slice(128, 488)
    queries = rng.standard_normal((50, 16)).astype(np.float32)
    indexes = tuple(
        build_head(
            keys[head, middle].copy(),
            values[head, middle].copy(),
            queries,
            exact_top_k(torch.from_numpy(queries), torch.from_numpy(keys[head, middle]), 20),
            params=IndexParams(),
        )
        for head in range(kv_heads)
    )
    pinned = torch.from_numpy(np.delete(keys, middle, axis=1))
    shown = torch.from_numpy(np.delete(values, middle, axis=1))
    fake: Any = NumberedContext(
        1000,
        Window(1000, [pinned], [shown], [640]),
        (LayerIndex(indexes, tuple(untuned_plan() for _ in indexes)),),
    )
    sequences = [Sequence(model, fake, budget=budget) for _ in range(2)]
    retrieval = Retrieval(threads=1)
    step = Step(sequences, 1, is_question=False, retrieval=retrieval, clock=time.monotonic)
    q, k = torch.randn(2, query_heads, 1, 16), torch.randn(2, kv_heads, 1, 16)
    v = torch.from_numpy(numbers).view(1, -1, 1, 1).expand_as(k)
    out = step.attend(0, q, k, v, scaling=0.25)
    want = (torch.arange(query_heads) // (query_heads // kv_heads)).float()
    assert torch.allclose(out, want.view(1, -1, 1, 1).expand_as(out), atol=1e-4)
