"""Ctrl-C: where it lands, what it ends, and that it never hangs in the set-up of a call."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from openbook.client.interrupts import close_when_interrupted, interruptible, is_interrupted

from .conftest import FakeServer

WIDE_WINDOW = """
import sys, time
import grpc._channel
start = grpc._channel._run_channel_spin_thread
def late(state):
    print("setting up", file=sys.stderr, flush=True)
    time.sleep(0.3)  # the call is counted, and nothing ends it yet
    start(state)
grpc._channel._run_channel_spin_thread = late
from openbook.client.cli import main
main()
"""


def interrupt_soon() -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_interrupt_closes_and_raises_nothing_in_the_verb() -> None:
    closed = threading.Event()
    seen: list[bool] = []

    @interruptible
    def verb() -> None:
        close_when_interrupted(closed.set)
        interrupt_soon()
        seen.append(closed.wait(timeout=10) and is_interrupted())

    before = signal.getsignal(signal.SIGINT)
    verb()
    assert seen == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_verb_that_is_not_interrupted_is_as_without() -> None:
    @interruptible
    def verb(text: str, *, count: int) -> None:
        raise KeyError(text * count)

    with pytest.raises(KeyError, match="abab"):
        verb("ab", count=2)
    assert not is_interrupted()


def test_second_interrupt_changes_nothing() -> None:
    closed = threading.Event()

    @interruptible
    def verb() -> None:
        close_when_interrupted(closed.set)
        interrupt_soon()
        assert closed.wait(timeout=10)
        interrupt_soon()
        time.sleep(0.2)

    verb()


def test_verb_that_does_not_end_ends_with_the_process() -> None:
    """One that reads a terminal, say: nothing can be closed that would end it."""
    code = (
        "import os, signal, sys, time; from openbook.client import interrupts\n"
        "@interrupts.interruptible\n"
        "def verb():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "verb()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "openbook: interrupted\n")


def test_ingest_interrupted_in_the_set_up_of_its_watch_ends(
    fake: FakeServer, tmp_path: Path
) -> None:
    """KeyboardInterrupt raised there left a call that closing the channel waited for, for ever."""
    fake.service.is_watch_held = True
    path = tmp_path / "light.txt"
    path.write_text("Some text.", encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-c", WIDE_WINDOW, "ingest", str(path)],
        env=os.environ | {"OPENBOOK_SERVER": fake.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            context_id = process.stderr.readline().split()[-1]
            assert process.stderr.readline() == "setting up\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
        finally:
            process.kill()
        assert re.fullmatch(r"[0-9a-f]{32}", context_id)
        assert process.stderr.read().splitlines()[-1] == (
            f"openbook: still being read as {context_id}; "
            f"`openbook contexts delete {context_id}` stops it"
        )
