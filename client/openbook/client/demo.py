"""`openbook demo`: facts planted in a real document, asked before and after a hard kill.

Knows: the script of the demo, step by step. Does not know: how the server stores or answers. It
fails when an answer is wrong, and when the restored context cost more than the question's tokens.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from openbook.client.asks import Budget
from openbook.client.client import Client
from openbook.client.console import elapsed, ingest_progress, printable
from openbook.client.demo_model import demo_model
from openbook.client.demo_report import Asked, Figures, Forwarded, print_figures, write_json
from openbook.client.demo_server import DemoFailed, DemoServer, last_line, serve_command
from openbook.client.views import Layout, Result

LAYOUT: Layout = "completion"  # the demo model is small: it continues, and hardly answers
MEASURED_TOKENS = 32  # of the two asks that time a generated token
PREFILL_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Fact:
    """A question whose continuation is `code`, planted in the document."""

    question: str
    code: str


@dataclass(frozen=True, slots=True)
class Script:
    """What the demo reads and asks."""

    document: Path
    facts: tuple[Fact, ...]
    model: str


def read_script(document: Path | None, facts: Path | None, *, model: str | None) -> Script:
    """Find and check what the demo needs; None means the example's own.

    Raises ValueError or OSError that says what is missing.
    """
    if (document is None) != (facts is None):
        raise ValueError("--document and --facts go together: the facts are of the document")
    document = document or _example("esther.txt")
    facts = facts or _example("facts.json")
    text = document.read_text(encoding="utf-8")
    planted = tuple(_fact(entry, facts) for entry in json.loads(facts.read_text("utf-8")))
    for fact in planted:
        if f"{fact.question} {fact.code}" not in text:
            raise ValueError(f"{facts.name}: a fact is not in {document.name}")
    if not planted:
        raise ValueError(f"{facts.name} holds no facts")
    return Script(document, planted, model or str(demo_model()))


def run(script: Script, *, root: Path | None, keep: bool, json_file: Path | None) -> list[str]:
    """Play the demo in `root` (None: a temporary directory); return what went wrong, if anything.

    Raises DemoFailed when it cannot be played to its end.
    """
    console = Console(highlight=False)
    with _workplace(root, keep, console) as directory:
        figures = _play(script, directory, console)
    print_figures(figures, console)
    if json_file is not None:
        write_json(figures, json_file)
    return figures.faults()


def _play(script: Script, directory: Path, console: Console) -> Figures:
    """Read, ask, kill, ask again, and read again without the store."""
    command = serve_command(script.model, directory / "data")
    server = DemoServer(command, log=directory / "server.log")
    try:
        address, start_s = _start(server, console)
        with Client(address) as client:
            context_id, ingest_s = _ingest(client, script, console)
            info = client.context(context_id)
            console.print("\nAsking, with the default budget:")
            fresh = [_ask_fact(client, context_id, fact, console) for fact in script.facts]
            exact = _ask_long(client, context_id, script.facts[0], "exact")
            keys = _ask_long(client, context_id, script.facts[0], None)
        console.print("\nKilling the server.")
        server.kill()
        address, restart_s = _start(server, console)
        with Client(address) as client:
            forwarded = _count_forwarded(client, context_id, script.facts[0])
            console.print("\nAsking again:")
            restored = [_ask_fact(client, context_id, fact, console) for fact in script.facts]
    finally:
        server.stop()
    console.print()
    with elapsed("Reading the document again without the store, to compare", console):
        prefill_first_token_s = _prefill_again(script)
    return Figures(
        context=info,
        ingest_s=ingest_s,
        start_s=start_s,
        restart_s=restart_s,
        fresh=tuple(fresh),
        restored=tuple(restored),
        forwarded=forwarded,
        exact=exact.receipt,
        keys=keys.receipt,
        prefill_first_token_s=prefill_first_token_s,
    )


def _start(server: DemoServer, console: Console) -> tuple[str, float]:
    """Start the server; return its address and the seconds that took."""
    begin = time.monotonic()
    with elapsed("Starting the server", console):
        address = server.start()
    start_s = time.monotonic() - begin
    console.print(f"The server is ready on {address} after {start_s:.1f} s.")
    return address, start_s


def _ingest(client: Client, script: Script, console: Console) -> tuple[str, float]:
    """Ingest the document; return the context id and the seconds that took."""
    console.print(f"Reading {script.document.name}:")
    begin = time.monotonic()
    with ingest_progress(console) as show:
        context_id = client.ingest(script.document, layout=LAYOUT, on_progress=show)
    return context_id, time.monotonic() - begin


def _ask_fact(client: Client, context_id: str, fact: Fact, console: Console) -> Asked:
    """Ask for one fact as a continuation, and show the answer as it streams."""
    console.print(f"  {fact.question}", end="", markup=False)
    begin = time.monotonic()
    first_token_s = None
    stop = [".", "\n"]
    with client.ask(context_id, fact.question, max_tokens=len(fact.code) + 4, stop=stop) as answer:
        for piece in answer:
            first_token_s = first_token_s or time.monotonic() - begin
            console.print(printable(piece), end="", markup=False, style="bold")
        result = answer.result()
    asked = Asked(
        question=fact.question,
        code=fact.code,
        text=result.text,
        first_token_s=first_token_s or time.monotonic() - begin,
        usage=result.usage,
        receipt=result.receipt,
    )
    console.print("  right" if asked.is_right else f"  wrong: it is {fact.code}")
    return asked


def _ask_long(client: Client, context_id: str, fact: Fact, budget: Budget | None) -> Result:
    """Generate MEASURED_TOKENS tokens under `budget`, for the receipt's times."""
    return client.ask(context_id, fact.question, max_tokens=MEASURED_TOKENS, budget=budget).result()


def _count_forwarded(client: Client, context_id: str, fact: Fact) -> Forwarded:
    """Ask for one token, and count what the receipt and the model itself say was forwarded.

    The first answer token comes from the question's own forward, so that nothing else is counted.
    This is the first ask of a new process: its first token pays for opening the context.
    """
    before = _tokens_forwarded(client)
    begin = time.monotonic()
    with client.ask(context_id, fact.question, max_tokens=1) as answer:
        for _ in answer:
            break
        first_token_s = time.monotonic() - begin
        result = answer.result()
    return Forwarded(
        question_tokens=result.usage.question_tokens,
        by_receipt=result.receipt.tokens_prefilled,
        by_model=_tokens_forwarded(client) - before,
        first_token_s=first_token_s,
        receipt=result.receipt,
    )


def _tokens_forwarded(client: Client) -> int:
    """Return how many tokens the server's models have forwarded in all."""
    return sum(model.tokens_forwarded for model in client.models())


def _prefill_again(script: Script) -> float:
    """Return the seconds to the first token when document and question are read anew."""
    command = [sys.executable, "-m", "openbook.worker.baseline", "--model", script.model]
    command += ["--document", str(script.document), "--question", script.facts[0].question]
    command += ["--layout", LAYOUT]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PREFILL_S_MAX, check=True)
        return float(json.loads(last_line(done.stdout))["first_token_ms"]) / 1000
    except subprocess.CalledProcessError as error:
        said = last_line(error.stderr)
        raise DemoFailed(f"reading the document again failed: {said}") from error
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(f"reading the document again took over {PREFILL_S_MAX:.0f} s") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DemoFailed("reading the document again gave no time to its first token") from error


@contextmanager
def _workplace(root: Path | None, keep: bool, console: Console) -> Iterator[Path]:
    """Yield an empty directory; remove what the demo put there, unless it is to be kept."""
    if root is None:
        directory = Path(tempfile.mkdtemp(prefix="openbook-demo-"))
    else:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise ValueError(f"{root} is not empty; the demo starts from nothing")
        directory = root
    try:
        yield directory
    finally:
        if keep:
            console.print(f"Kept: {directory / 'data'}", soft_wrap=True)
        else:
            shutil.rmtree(directory)


def _example(name: str) -> Path:
    """Return a file of the checkout's examples, from here or from the checkout's root."""
    for folder in (Path("examples"), Path(__file__).parents[3] / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"examples/{name} is in the source checkout only; name --document and --facts")


def _fact(entry: object, source: Path) -> Fact:
    """Read one entry of the facts' file."""
    if isinstance(entry, dict) and set(entry) == {"question", "code"}:
        question, code = entry["question"], entry["code"]
        if isinstance(question, str) and isinstance(code, str):
            return Fact(question, code)
    raise ValueError(f'{source.name}: every fact is {{"question": "...", "code": "..."}}')
