"""Continuous batching: every step runs one block of one question and one token of every answer.

Owns the asks from submission to their last event, and their order. It knows nothing of networks:
events go to a callback, on the engine's thread. `step()` is the whole engine: schedule, run,
postprocess.

    submit ──> waiting ──schedule──> asking (blocks of the question) ──> answering (tokens) ──> gone
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from openbook.indexstore.head import Budget, PlanKind
from openbook.worker.decode import BLOCK_TOKENS, Runner, Sequence
from openbook.worker.errors import BadAsk, EngineClosed, QuestionTooLong
from openbook.worker.models import Model
from openbook.worker.opened import OpenContexts, OpenedContext
from openbook.worker.receipt import Receipt, Timeline, Usage, make_receipt
from openbook.worker.retrieval import Retrieval
from openbook.worker.sampling import Sampler, SamplingSettings, check_answer_limits
from openbook.worker.text import TextStream
from openbook.worker.tokens import answer_tokens_max, question_tokens

QUESTION_TOKENS_MAX = 4096
IDLE_WAIT_S = 0.1  # how late `run` may notice that it should stop; new asks wake it at once

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class AskSpec:
    """A question and how to answer it. `plan` forces one plan on every head, for measurement.

    Asks of different `caller`s take turns where some have to wait.
    """

    question: str
    answer_prefix: str = ""
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    budget: Budget = Budget()
    plan: PlanKind | None = None
    evidence: bool = False
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of the answer; never empty, never a broken character before the last."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer that ended by itself."""

    usage: Usage
    finish_reason: FinishReason
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of an answer that could not go on."""

    error: Exception


AnswerEvent = Delta | Finished | Failed
OnEvent = Callable[[AnswerEvent], None]


class Ask:
    """One question on its way to an answer. Only `cancel` and `answer_ids` are for outsiders."""

    def __init__(
        self,
        spec: AskSpec,
        context: OpenedContext,
        on_event: OnEvent,
        *,
        sequence: Sequence,
        question_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        answer_max: int,
        sampler: Sampler,
        text: TextStream,
        timeline: Timeline,
    ) -> None:
        """Made by Engine.submit; `context` is this ask's own claim and closed with it."""
        self.spec = spec
        self.context = context
        self.on_event = on_event
        self.sequence = sequence
        self.question_ids = question_ids
        self.answer_max = answer_max
        self.sampler = sampler
        self.text = text
        self.timeline = timeline
        self.tokens_prefilled = 0
        self.is_cancelled = False
        self.is_over = False
        self._answer_ids: list[int] = []

    @property
    def answer_ids(self) -> list[int]:
        """The ids of the answer so far, without an end-of-turn id."""
        return list(self._answer_ids)

    @property
    def questions_left(self) -> int:
        """The question tokens not run yet."""
        return max(0, len(self.question_ids) - self.sequence.tail.length)

    def cancel(self) -> None:
        """Stop within one step; no event comes after the step under way. From any thread."""
        self.is_cancelled = True


class Engine:
    """Answers asks over open contexts of one model. One thread calls `step` or `run`."""

    def __init__(
        self,
        model: Model,
        *,
        threads: int,
        sequences_max: int,
        question_tokens_max: int = QUESTION_TOKENS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `threads` cores; run at most `sequences_max` asks at once, the others wait.

        A question with its answer prefix may have `question_tokens_max` tokens.
        """
        if min(threads, sequences_max, question_tokens_max) < 1:
            raise ValueError(
                f"threads {threads}, sequences_max {sequences_max} and question_tokens_max "
                f"{question_tokens_max} must be positive"
            )
        torch.set_num_threads(threads)
        self.contexts = OpenContexts(model, clock=clock)
        self._model = model
        self._clock = clock
        self._sequences_max = sequences_max
        self._question_tokens_max = question_tokens_max
        self._runner = Runner(model, Retrieval(threads=threads), clock=clock)
        self._wake = threading.Condition()
        self._waiting: deque[Ask] = deque()
        self._active: list[Ask] = []
        self._turns: dict[str, int] = {}  # of callers that have asks: when one was last begun
        self._is_closed = False
        # The model's own count would include an ingest on another thread: count this thread's.
        self._thread: int | None = None
        self._tokens_run = 0
        self._hook = model.base.get_input_embeddings().register_forward_hook(self._see)

    def open(self, path: Path, context_id: str) -> OpenedContext:
        """Open the context at `path`, verified, its window pinned; the caller closes the claim.

        Loaded once however many ask for it. Raises the store's errors. From any thread.
        """
        return self.contexts.open(path, context_id)

    def retire(self, path: Path, context_id: str) -> None:
        """Have the next open read the files anew; claims that are open stay. From any thread."""
        self.contexts.retire(path, context_id)

    def submit(
        self,
        spec: AskSpec,
        context: OpenedContext,
        on_event: OnEvent,
        *,
        asked_at: float | None = None,
    ) -> Ask:
        """Queue an ask, which takes its own claim on `context`. From any thread.

        `asked_at` is when it arrived, by the engine's clock, if it waited for its context since.
        `on_event` is called on the engine's thread: Delta events, then one Finished or Failed, or
        nothing more once cancelled. Raises BadAsk, QuestionTooLong, EngineClosed, and ValueError
        when the claim is closed.
        """
        submitted = self._clock()
        check_answer_limits(max_tokens=spec.max_tokens, stop=spec.stop)
        if spec.evidence:
            raise BadAsk("evidence", "is not served yet")
        settings = SamplingSettings(spec.temperature, spec.top_p, spec.seed)
        layout = context.manifest.prompt_layout
        ids = question_tokens(self._model, spec.question, spec.answer_prefix, layout)
        if len(ids) > self._question_tokens_max:
            raise QuestionTooLong(len(ids), self._question_tokens_max)
        answer_max = answer_tokens_max(
            self._model,
            context_tokens=context.token_count,
            question_tokens=len(ids),
            max_tokens=spec.max_tokens,
        )
        claim = context.hold()
        try:
            ask = Ask(
                spec,
                claim,
                on_event,
                sequence=Sequence(self._model, claim, budget=spec.budget, plan=spec.plan),
                question_ids=ids,
                answer_max=answer_max,
                sampler=Sampler(settings),
                text=TextStream(self._model.vocabulary.marked, spec.stop),
                timeline=Timeline(submitted if asked_at is None else asked_at, submitted),
            )
            with self._wake:
                if self._is_closed:
                    raise EngineClosed
                self._waiting.append(ask)
                self._wake.notify_all()
        except BaseException:
            claim.close()
            raise
        return ask

    @property
    def load(self) -> tuple[int, int]:
        """The number of asks running and waiting."""
        with self._wake:
            return len(self._active), len(self._waiting)

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set, sleeping while there is nothing to do; then close."""
        while not stop.is_set():
            if not self.step():
                with self._wake:
                    if not self._waiting:
                        self._wake.wait(IDLE_WAIT_S)
        self.close()

    def close(self) -> None:
        """Fail what is still queued or running, and take no more. On the engine's thread."""
        with self._wake:
            self._is_closed = True
            left = [*self._active, *self._waiting]
            self._waiting.clear()
        for ask in left:
            self._fail(ask, EngineClosed())
        self._active = []
        self._hook.remove()

    def step(self) -> bool:
        """Run one block of one question and one token of every answer; False when idle."""
        self._thread = threading.get_ident()
        self._schedule()
        if not self._active:
            return False
        answering = [ask for ask in self._active if not ask.questions_left]
        asking = next((ask for ask in self._active if ask.questions_left), None)
        if asking is not None:
            self._run_block(asking)
        if answering:
            self._run_tokens(answering)
        self._active = [ask for ask in self._active if not ask.is_over]
        if asking is not None and not asking.is_over:
            # The next step runs another question's block, so that a long one delays none.
            self._active.remove(asking)
            self._active.append(asking)
        return True

    def _schedule(self) -> None:
        """Let cancelled asks go and take waiting ones in turn."""
        with self._wake:
            cancelled = [a for a in (*self._active, *self._waiting) if a.is_cancelled]
            self._waiting = deque(a for a in self._waiting if not a.is_cancelled)
            self._active = [a for a in self._active if not a.is_cancelled]
            while self._waiting and len(self._active) < self._sequences_max:
                ask = self._next()
                self._waiting.remove(ask)
                ask.timeline.started = self._clock()
                self._active.append(ask)
        for ask in cancelled:
            self._leave(ask)

    def _next(self) -> Ask:
        """Return the oldest waiting ask of the caller whose turn it is.

        That is the one with the fewest running, and of those the one served longest ago.
        """
        running = Counter(ask.spec.caller for ask in self._active)
        known = running.keys() | {ask.spec.caller for ask in self._waiting}
        self._turns = {caller: turn for caller, turn in self._turns.items() if caller in known}
        ask = min(
            self._waiting,
            key=lambda ask: (running[ask.spec.caller], self._turns.get(ask.spec.caller, 0)),
        )
        self._turns[ask.spec.caller] = 1 + max(self._turns.values(), default=0)
        return ask

    def _run_block(self, ask: Ask) -> None:
        """Run the next block of a question; after the last, choose the first answer token."""
        first = ask.sequence.tail.length
        block = ask.question_ids[first : first + BLOCK_TOKENS]
        before = self._tokens_run
        try:
            logits = self._runner.run_block(
                ask.sequence, block, is_last=first + len(block) == len(ask.question_ids)
            )
        except Exception as error:
            self._fail(ask, error)
            return
        ask.tokens_prefilled += self._tokens_run - before
        if logits is not None:
            self._postprocess(ask, logits)

    def _run_tokens(self, asks: list[Ask]) -> None:
        """Run the last token of each answer together; if that fails, each alone."""
        try:
            logits = self._runner.run_tokens(
                [ask.sequence for ask in asks], [ask._answer_ids[-1] for ask in asks]
            )
        except Exception as error:
            # A failed step leaves every sequence as it was: find whose failure it is.
            if len(asks) == 1:
                self._fail(asks[0], error)
            else:
                for ask in asks:
                    self._run_tokens([ask])
            return
        for ask, row in zip(asks, logits, strict=True):
            self._postprocess(ask, row)

    def _postprocess(self, ask: Ask, logits: torch.Tensor) -> None:
        """Choose the next id, send its text, and end the answer where it ends."""
        try:
            ask.context.check()  # before anything that was read is believed
            chosen = ask.sampler.choose(logits)
            ask.timeline.last_id = self._clock()
            if not ask._answer_ids:
                ask.timeline.first_id = ask.timeline.last_id
            if chosen in self._model.eos_ids:
                self._finish(ask, "stop")
                return
            ask._answer_ids.append(chosen)
            self._send(ask, ask.text.push(chosen))
            if ask.text.is_stopped:
                self._finish(ask, "stop")
            elif len(ask._answer_ids) == ask.answer_max:
                self._finish(ask, "length")
        except Exception as error:
            self._fail(ask, error)

    def _finish(self, ask: Ask, reason: FinishReason) -> None:
        self._send(ask, ask.text.finish())
        if ask.text.is_stopped:
            reason = "stop"
        count = len(ask._answer_ids)
        usage = Usage(ask.context.token_count, len(ask.question_ids), count)
        receipt = make_receipt(ask.sequence, ask.timeline, tokens_prefilled=ask.tokens_prefilled)
        self._leave(ask)
        self._emit(ask, Finished(usage, reason, receipt))

    def _send(self, ask: Ask, text: str) -> None:
        if text:
            self._emit(ask, Delta(text))

    def _fail(self, ask: Ask, error: Exception) -> None:
        """End one ask with an error; the others go on."""
        self._leave(ask)
        self._emit(ask, Failed(error))

    def _emit(self, ask: Ask, event: AnswerEvent) -> None:
        """Tell the listener; one that raises is not there any more, and its ask goes."""
        if ask.is_cancelled:
            return
        try:
            ask.on_event(event)
        except Exception:
            ask.cancel()

    def _leave(self, ask: Ask) -> None:
        ask.is_over = True
        ask.context.close()

    def _see(self, _module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        """Count the token ids that this engine's thread runs through the model's embedding."""
        if threading.get_ident() == self._thread:
            self._tokens_run += inputs[0].numel()
