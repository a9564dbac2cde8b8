"""Threads that share the heads of a call answer as one does, for many callers and after a fork."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from test_attend import request_of, two_heads

from openbook.indexstore.attend import _pool, attend
from openbook.indexstore.head import EXACT, AttendResult, Budget


def assert_the_same(results: list[AttendResult], right: list[AttendResult]) -> None:
    for mine, theirs in zip(results, right, strict=True):
        assert np.array_equal(mine.out, theirs.out)
        assert np.array_equal(mine.lse, theirs.lse)
        assert np.array_equal(mine.estimated_lse, theirs.estimated_lse)
        assert mine.keys_read == theirs.keys_read
        assert mine.keys_scored == theirs.keys_scored


def test_requests_by_clusters_are_answered_alike_however_many_threads_share_them() -> None:
    requests = [request_of(*two_heads(m, 16)) for m in (150, 1, 900, 33, 400)]
    alone = attend(requests)
    for threads in (2, 3, 8):
        for _ in range(20):
            assert_the_same(attend(requests, threads=threads), alone)
    assert_the_same(attend(requests * 30, threads=300), alone * 30)


def test_callers_that_attend_in_threads_at_once_are_answered_alike() -> None:
    requests = [request_of(*two_heads(m, 16)) for m in (150, 900, 400)]
    alone, wrong = attend(requests), []

    def ask(threads: int) -> None:
        try:
            for _ in range(50):
                assert_the_same(attend(requests, threads=threads), alone)
        except AssertionError as error:
            wrong.append(error)

    askers = [threading.Thread(target=ask, args=(2 + number,)) for number in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
        assert not asker.is_alive()
    assert not wrong


@pytest.mark.parametrize("budget", [Budget(), EXACT])
def test_where_no_thread_can_be_started_the_calling_one_does_all(
    budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    requests = [request_of(*two_heads(300, 16), budget=budget) for _ in range(3)]
    alone = attend(requests)
    _pool.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_the_same(attend(requests, threads=7), alone)
    monkeypatch.undo()
    assert_the_same(attend(requests, threads=7), alone)


def exit_code_of(child: int) -> int:
    """Wait 30 s for a process, then kill it; its exit code."""
    for _ in range(3000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("budget", [Budget(), EXACT])
def test_a_fork_of_a_process_that_attends_in_threads_may_attend_in_threads(budget: Budget) -> None:
    requests = [request_of(*two_heads(300, 16), budget=budget) for _ in range(4)]
    (right, *_), is_over = attend(requests, threads=3), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            attend(requests, threads=3)

    asker = threading.Thread(target=ask)
    if budget.kind == "keys":  # threads of C: a pool of Python's may be forked between its calls
        asker.start()
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                (mine, *_) = attend(requests, threads=3)
                os._exit(7 if np.array_equal(mine.out, right.out) else 1)
            assert exit_code_of(child) == 7
    finally:
        is_over.set()
        if asker.ident:
            asker.join(60)
