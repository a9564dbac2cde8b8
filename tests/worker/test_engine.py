"""Claims about the engine: batching, isolation, cancelling, limits and receipts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from openbook.indexstore.errors import ShardTruncated
from openbook.indexstore.head import EXACT, Budget
from openbook.worker import Delta, Engine, Finished
from openbook.worker.decode import BLOCK_TOKENS, Runner
from openbook.worker.engine import AnswerEvent
from openbook.worker.errors import EngineClosed
from openbook.worker.models import Model
from openbook.worker.opened import OpenedContext
from openbook.worker.sampling import Sampler

from .asking import Asked, run_all, spec

Tiny = Callable[..., Model]
ReadContext = Callable[..., Path]
Digits = Callable[[int], bytes]


def test_an_ask_streams_text_and_ends_with_a_receipt(
    engine: Engine, context: OpenedContext, tiny_model: Tiny
) -> None:
    asked = Asked(engine, spec(), context)
    run_all(engine)
    ids = asked.ask.answer_ids
    assert asked.text == tiny_model("llama", 9, 3).vocabulary.marked.decode(ids)
    done = asked.finished
    assert done.usage.context_tokens == 900 and done.usage.answer_tokens == len(ids)
    assert done.finish_reason == ("length" if len(ids) == 12 else "stop")


def test_receipt_counts_what_was_read(engine: Engine, context: OpenedContext) -> None:
    asked = Asked(engine, spec(budget=Budget(keys=20)), context)
    exact = Asked(engine, spec(budget=EXACT), context)
    run_all(engine)
    receipt, all_of_it = asked.finished.receipt, exact.finished.receipt
    assert receipt.tokens_reused == 900
    assert receipt.tokens_prefilled == asked.finished.usage.question_tokens
    # What was scored exactly for three query heads: at least two for each key that is wanted.
    assert 40 <= receipt.keys_read < 200
    assert 0 < receipt.centroids_scored < receipt.keys_scored <= 260 / 900
    assert 0 < receipt.mass_estimated < 1
    assert receipt.budget == "keys=20+estimate" and receipt.plan == "clusters"
    assert all_of_it.keys_read == 260 and all_of_it.mass_estimated == 0
    assert all_of_it.budget == "exact" and all_of_it.keys_scored == pytest.approx(260 / 900)
    assert receipt.bytes_mapped > 0
    assert 0 < receipt.question_ms <= receipt.first_token_ms
    assert receipt.token_ms > 0 and receipt.middle_ms > 0 and receipt.device_ms > 0


def test_case_b30_nothing_of_the_context_is_recomputed(
    tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    model = tiny_model("llama", 9, 3)
    path = read_context(model, digits(1200))
    for _ in range(2):  # a second engine stands for the service after a restart
        engine = Engine(model, threads=1, sequences_max=1)
        before = model.tokens_forwarded
        claim = engine.open(path, path.name)
        assert model.tokens_forwarded == before
        asked = Asked(engine, spec(), claim)
        while not asked.ask.answer_ids and not asked.events:
            engine.step()
        question = len(asked.ask.question_ids)
        assert model.tokens_forwarded - before == question
        run_all(engine)
        assert asked.finished.receipt.tokens_prefilled == question
        claim.close()
        engine.close()


def test_case_b37_a_question_leaves_nothing_for_the_next(
    engine: Engine, context: OpenedContext
) -> None:
    answers = []
    for question in ("Who came?", "And a longer one, about something else?", "Who came?"):
        asked = Asked(engine, spec(question), context)
        run_all(engine)
        answers.append(asked.ask.answer_ids)
        assert context.token_count == 900
        assert context.window.keys[0].shape[1] == 640
    assert answers[0] == answers[2] and answers[0] != answers[1]


def test_case_b38_the_same_ask_gives_the_same_ids_again_and_after_reopening(
    engine: Engine, context: OpenedContext, tiny_model: Tiny, read_context: ReadContext
) -> None:
    model = tiny_model("llama", 9, 3)
    asks = [Asked(engine, spec(), context) for _ in range(1)]
    run_all(engine)
    for _ in range(3):
        asks.append(Asked(engine, spec(), context))
        run_all(engine)
    other = Engine(model, threads=2, sequences_max=2)
    path = context._key[0]
    claim = other.open(path, path.name)
    asks.append(Asked(other, spec(), claim))
    run_all(other)
    claim.close()
    other.close()
    assert len({tuple(asked.ask.answer_ids) for asked in asks}) == 1


@pytest.mark.parametrize("budget", [EXACT, Budget()], ids=["exact", "keys"])
def test_a_batch_gives_the_ids_of_each_ask_alone(
    budget: Budget, engine: Engine, context: OpenedContext
) -> None:
    questions = ["One?", "Is it two " + "and more " * 200 + "?", "Three, perhaps?", "Four?"]
    alone = []
    for question in questions:
        asked = Asked(engine, spec(question, budget=budget, max_tokens=24), context)
        run_all(engine)
        alone.append(asked.ask.answer_ids)
    together = [Asked(engine, spec(q, budget=budget, max_tokens=24), context) for q in questions]
    run_all(engine)
    assert [asked.ask.answer_ids for asked in together] == alone


def test_contexts_of_different_lengths_share_a_batch(
    engine: Engine,
    context: OpenedContext,
    tiny_model: Tiny,
    read_context: ReadContext,
    digits: Digits,
) -> None:
    path = read_context(tiny_model("llama", 9, 3), digits(300))  # no middle
    short = engine.open(path, path.name)
    alone = []
    for claim in (context, short):
        asked = Asked(engine, spec(budget=EXACT), claim)
        run_all(engine)
        alone.append(asked.ask.answer_ids)
    both = [Asked(engine, spec(budget=EXACT), claim) for claim in (context, short)]
    run_all(engine)
    short.close()
    assert [asked.ask.answer_ids for asked in both] == alone
    assert both[1].finished.receipt.plan == "window"
    assert both[1].finished.receipt.keys_read == 0


def test_a_long_question_delays_no_answer(engine: Engine, context: OpenedContext) -> None:
    short = Asked(engine, spec(max_tokens=8), context)
    engine.step()
    long = Asked(engine, spec("very long " * 450), context)
    assert long.ask.questions_left > 5 * BLOCK_TOKENS
    for count in range(2, 7):
        engine.step()
        assert len(short.ask.answer_ids) == count
    assert not long.ask.answer_ids
    run_all(engine)
    assert long.finished and short.finished


def test_case_b40_a_cancelled_ask_leaves_within_one_step(
    engine: Engine, context: OpenedContext
) -> None:
    alone = Asked(engine, spec(max_tokens=24), context)
    run_all(engine)
    kept, cut = (Asked(engine, spec(max_tokens=24), context) for _ in range(2))
    while len(cut.ask.answer_ids) < 3:
        engine.step()
    cut.ask.cancel()
    had = len(cut.events)
    engine.step()
    assert engine.load == (1, 0) and len(cut.events) == had and not cut.ask.context.is_open
    run_all(engine)
    assert kept.ask.answer_ids == alone.ask.answer_ids


def test_case_b40_a_queued_ask_can_be_cancelled(tiny_model: Tiny, context: OpenedContext) -> None:
    engine = Engine(tiny_model("llama", 9, 3), threads=1, sequences_max=1)
    first, queued = (Asked(engine, spec(), context) for _ in range(2))
    engine.step()
    assert engine.load == (1, 1)
    queued.ask.cancel()
    run_all(engine)
    assert first.finished and not queued.events and not queued.ask.context.is_open
    engine.close()


def test_an_error_ends_one_ask_and_the_others_go_on(
    engine: Engine, context: OpenedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Asked(engine, spec(), context)
    run_all(engine)
    good, bad = Asked(engine, spec(), context), Asked(engine, spec("Bad?"), context)
    engine.step()
    engine.step()
    genuine = Runner.run_tokens

    def faulty(self: Runner, sequences: list[object], ids: list[int]) -> torch.Tensor:
        if bad.ask.sequence in sequences:
            raise MemoryError("injected")
        return genuine(self, sequences, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "run_tokens", faulty)
    run_all(engine)
    assert isinstance(bad.error, MemoryError)
    assert good.ask.answer_ids == alone.ask.answer_ids and good.finished


def test_a_failing_question_ends_one_ask(
    engine: Engine, context: OpenedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, bad = Runner.run_block, Asked(engine, spec("Bad?"), context)

    def faulty(self: Runner, sequence: object, ids: np.ndarray, *, is_last: bool) -> object:
        if sequence is bad.ask.sequence:
            raise RuntimeError("injected")
        return genuine(self, sequence, ids, is_last=is_last)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "run_block", faulty)
    good = Asked(engine, spec(), context)
    run_all(engine)
    assert isinstance(bad.error, RuntimeError) and good.finished


def test_a_file_cut_short_while_it_is_read_ends_its_answers_alone(
    engine: Engine, tiny_model: Tiny, read_context: ReadContext, digits: Digits
) -> None:
    """Without the guard of the mapped files this is a SIGBUS, and the end of the process."""
    paths = [read_context(tiny_model("llama", 9, 3), digits(n)) for n in (900, 950)]
    claims = [engine.open(path, path.name) for path in paths]
    bad, good = (Asked(engine, spec(max_tokens=20), claim) for claim in claims)
    for _ in range(4):
        engine.step()
    sent = len(bad.events)
    layer = paths[0] / "layer-000.mdb"
    layer.chmod(0o600)
    os.truncate(layer, 4096)
    run_all(engine)
    assert isinstance(bad.error, ShardTruncated) and bad.error.file == layer.name
    assert len(bad.events) == sent + 1, "no text after the damage"
    assert good.finished.usage.answer_tokens > 0
    after = Asked(engine, spec(), claims[1])
    run_all(engine)
    assert after.finished
    for claim in claims:
        claim.close()


def test_a_listener_that_raises_loses_its_ask_alone(engine: Engine, context: OpenedContext) -> None:
    def gone(_: AnswerEvent) -> None:
        raise ConnectionError("nobody there")

    deaf = engine.submit(spec(), context, gone)
    good = Asked(engine, spec(), context)
    run_all(engine)
    assert deaf.is_over and not deaf.context.is_open and good.finished


def test_a_stop_string_ends_the_answer_before_it(engine: Engine, context: OpenedContext) -> None:
    free = Asked(engine, spec(max_tokens=30), context)
    run_all(engine)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    asked = Asked(engine, spec(max_tokens=30, stop=(stop,)), context)
    run_all(engine)
    assert asked.text == free.text[: free.text.index(stop)]
    assert asked.finished.finish_reason == "stop"


def test_an_ask_is_charged_for_the_wait_before_it_was_submitted(
    engine: Engine, context: OpenedContext
) -> None:
    events: list[AnswerEvent] = []
    engine.submit(spec(), context, events.append, asked_at=time.monotonic() - 5)
    asked = Asked(engine, spec(), context)
    run_all(engine)
    (late,) = (event.receipt for event in events if isinstance(event, Finished))
    assert 5000 <= late.open_ms <= late.first_token_ms
    assert asked.finished.receipt.open_ms == 0


@pytest.mark.parametrize("after", [0, 3])
def test_case_b53_an_end_of_turn_id_ends_the_answer_and_is_not_text(
    after: int, engine: Engine, context: OpenedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Asked(engine, spec(), context)
    run_all(engine)
    genuine, (end,) = Sampler.choose, sorted(engine._model.eos_ids)[:1]
    chosen: list[int] = []

    def ending(self: Sampler, logits: torch.Tensor) -> int:
        chosen.append(genuine(self, logits) if len(chosen) < after else end)
        return chosen[-1]

    monkeypatch.setattr(Sampler, "choose", ending)
    asked = Asked(engine, spec(), context)
    run_all(engine)
    assert len(chosen) == after + 1 and asked.ask.answer_ids == free.ask.answer_ids[:after]
    assert asked.finished.finish_reason == "stop"
    assert asked.finished.usage.answer_tokens == after
    assert free.text.startswith(asked.text) and "<|" not in asked.text


def test_an_ask_keeps_its_context_open(engine: Engine, context: OpenedContext) -> None:
    asked = Asked(engine, spec(), context)
    context.close()
    assert engine.contexts.open_count == 1
    run_all(engine)
    assert asked.finished and engine.contexts.open_count == 0
    with pytest.raises(ValueError, match="closed"):
        Asked(engine, spec(), context)


def test_run_answers_from_other_threads_and_stops(tiny_model: Tiny, context: OpenedContext) -> None:
    engine, stop = Engine(tiny_model("llama", 9, 3), threads=1, sequences_max=4), threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    done = threading.Barrier(4, timeout=60)
    texts: list[str] = []

    def ask() -> None:
        over = threading.Event()
        pieces: list[str] = []

        def listen(event: AnswerEvent) -> None:
            pieces.append(event.text if isinstance(event, Delta) else "")
            if isinstance(event, Finished):
                over.set()

        engine.submit(spec(), context, listen)
        assert over.wait(60)
        texts.append("".join(pieces))
        done.wait()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    done.wait()
    for asker in askers:
        asker.join()
    stop.set()
    thread.join(10)
    assert not thread.is_alive() and len(set(texts)) == 1
    with pytest.raises(EngineClosed):
        Asked(engine, spec(), context)


def test_closing_fails_what_is_left(tiny_model: Tiny, context: OpenedContext) -> None:
    engine = Engine(tiny_model("llama", 9, 3), threads=1, sequences_max=1)
    running, waiting = (Asked(engine, spec(), context) for _ in range(2))
    engine.step()
    engine.close()
    assert isinstance(running.error, EngineClosed) and isinstance(waiting.error, EngineClosed)
    assert not running.ask.context.is_open
