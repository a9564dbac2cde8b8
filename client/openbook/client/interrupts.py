"""Ctrl-C for verbs that wait for the service.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside gRPC's set-up of a
call that leaves a call which the channel counts and nobody ends, and closing the channel waits for
it for ever. So a verb runs in a thread of its own, where nothing is raised, and the main thread
does nothing but wait; on Ctrl-C it closes the verb's client, and the verb's call ends as cancelled.

Knows: threads and signals. Does not know: the verbs, or what they say when interrupted.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec

Given = ParamSpec("Given")
POLL_S = 0.05  # a signal is noticed between two waits
PATIENCE_S = 3.0  # for the verb to end once its client is closed
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it
EXIT_INTERRUPTED = 130  # Ctrl-C: 128 and SIGINT's number, as a shell has it


class Verb(threading.Thread):
    """One verb under way; `close`, once set, ends the call that it waits for."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(daemon=True)  # one that reads a silent terminal may never end
        self._run = run
        self.close: Callable[[], None] | None = None
        self.is_interrupted = False
        self.raised: BaseException | None = None

    def run(self) -> None:
        """Run the verb and keep what it raises, typer's way to name the exit code included."""
        try:
            self._run()
        except BaseException as error:
            self.raised = error


def is_interrupted() -> bool:
    """Tell whether Ctrl-C ended what the running verb does."""
    verb = threading.current_thread()
    return isinstance(verb, Verb) and verb.is_interrupted


def close_when_interrupted(close: Callable[[], None]) -> None:
    """Have Ctrl-C call `close`, from another thread, while the running verb goes on."""
    verb = threading.current_thread()
    if isinstance(verb, Verb):
        verb.close = close


def interruptible(verb: Callable[Given, None]) -> Callable[Given, None]:
    """Return `verb` as one that Ctrl-C ends, wherever it is."""

    @functools.wraps(verb)
    def guarded(*given: Given.args, **named: Given.kwargs) -> None:
        if threading.current_thread() is not threading.main_thread():
            verb(*given, **named)  # signals are the main thread's
            return
        _wait_for(Verb(lambda: verb(*given, **named)))

    return guarded


def _wait_for(verb: Verb) -> None:
    """Run a verb to its end, and raise what it raised."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        verb.is_interrupted = True  # takes no lock: the main thread may hold any

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        verb.start()
        while verb.is_alive() and not verb.is_interrupted:
            verb.join(POLL_S)
        if verb.is_alive():
            _end(verb)
    finally:
        signal.signal(signal.SIGINT, before)
    if verb.raised is not None:
        raise verb.raised


def _end(verb: Verb) -> None:
    """Close what an interrupted verb waits for; leave the process if that does not help."""
    closing = threading.Thread(target=verb.close, daemon=True) if verb.close else None
    if closing is not None:
        closing.start()
    verb.join(PATIENCE_S if closing is not None else 2 * POLL_S)
    if not verb.is_alive():
        return
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
    print("openbook: interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)  # an orderly end would wait for the thread that does not end
