"""The verbs of the `openbook` command: the client's, and those that an installed server adds.

Knows: options and exit codes (0 done, 1 the service refused or failed, 2 wrong usage, 130 Ctrl-C).
Does not know: the server. Its verbs are found in the entry-point group `openbook.commands` and
imported only when one is used, so that the client works without the server's libraries.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openbook.client.asks import Budget, Plan
from openbook.client.cli_checks import capacity, count, doctor
from openbook.client.cli_contexts import contexts_app
from openbook.client.cli_options import Server, connect, document_of, read_ttl
from openbook.client.console import (
    EXIT_FAILED,
    EXIT_USAGE,
    fail,
    ingest_progress,
    one_line_errors,
    one_line_json,
    print_fields,
    write_pieces,
)
from openbook.client.interrupts import interruptible
from openbook.client.views import Layout, Result

COMMANDS_GROUP = "openbook.commands"
VERB_HELP = {"serve": "Start the server."}  # here, as importing the verb to ask it takes its time

app = typer.Typer(
    name="openbook",
    help="Read a long document once; answer questions about it for as long as anyone asks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they print local variables, which hold documents
)
app.add_typer(contexts_app, name="contexts")
for verb in (count, capacity, doctor):
    app.command()(verb)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        try:
            print(f"openbook {version('openbook')}")
        except PackageNotFoundError:
            print("openbook, from a source tree that is not installed")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    pass


@app.command()
@interruptible
def ingest(
    file: Annotated[Path, typer.Argument(help="A UTF-8 text file; - reads standard input.")],
    server: Server = "localhost:50051",
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="chat: questions to an instruction-tuned model of some billions of parameters; "
            "completion: sentences to continue, for smaller and for base models.",
            show_default="chat, where the model has a template for it",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Display name.", show_default="the file's name")] = "",
    ttl: Annotated[
        str | None,
        typer.Option(
            help="How long it is kept after its last use: 7d, 12h, 30m or 3600 (seconds).",
            show_default="the server's, for ever",
        ),
    ] = None,
) -> None:
    """Have the service read a document, and print its context id."""
    console = Console(stderr=True)
    reading = ""

    def accepted(context_id: str) -> None:
        nonlocal reading
        reading = context_id
        console.print(f"being read as {context_id}", highlight=False, soft_wrap=True)

    def interrupted() -> str:
        if not reading:
            return "interrupted"
        stop = f"`openbook contexts delete {reading}` stops it"
        return f"still being read as {reading}; {stop}"

    with one_line_errors(server, interrupted=interrupted), connect(server) as client:
        with ingest_progress(console) as show:
            context_id = client.ingest(
                document_of(file),
                display_name=name,
                layout=layout,
                ttl=_ingest_ttl(ttl),
                on_accepted=accepted,
                on_progress=show,
            )
    print(context_id)


@app.command()
@interruptible
def ask(
    context_id: Annotated[str, typer.Argument(metavar="ID", help="The id that ingest printed.")],
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUESTION", help="Under --layout completion: a sentence's beginning."
        ),
    ],
    *,
    server: Server = "localhost:50051",
    answer_prefix: Annotated[str, typer.Option(help="Opens the answer.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Bound of the answer.", show_default="256")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="0")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus of the sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the answer; repeatable.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="exact, or the best keys wanted per query head.", show_default="100"),
    ] = None,
    estimate: Annotated[
        bool | None, typer.Option(help="Stand in for the keys not read.", show_default="estimate")
    ] = None,
    plan: Annotated[Plan | None, typer.Option(help="Force one search, to measure it.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds for the whole answer; the server has a limit of its own too.",
            show_default="the server's, 120",
        ),
    ] = None,
    receipt: Annotated[
        bool,
        typer.Option("--receipt", help="Print what the answer cost (docs/RECEIPT.md) on stderr."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, usage and receipt as one JSON object.")
    ] = False,
) -> None:
    """Ask a question about a context; the answer streams."""
    with (
        one_line_errors(server),
        connect(server) as client,
        client.ask(
            context_id,
            question,
            answer_prefix=answer_prefix,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop or (),
            budget=_budget(budget),
            estimate=estimate,
            plan=plan,
            timeout=timeout,
        ) as answer,
    ):
        if not as_json:
            write_pieces(answer, sys.stdout)
        result = answer.result()
    if as_json:
        print(one_line_json(asdict(result)))
    if receipt:
        print_fields(_receipt_fields(result), Console(stderr=True))


@app.command()
def demo(
    *,
    document: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text with facts in it; goes with --facts.",
            show_default="examples/esther.txt",
        ),
    ] = None,
    facts: Annotated[
        Path | None,
        typer.Option(
            help='JSON: a list of {"question": "The code is", "code": "4711"}, each a sentence of '
            "the document; goes with --document.",
            show_default="examples/facts.json",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face id, directory or GGUF file.", show_default="the demo's own"
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="An empty or new directory.", show_default="a temporary one"),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave what the server stored where it is.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the measured figures there.")
    ] = None,
) -> None:
    """Read a document with planted facts, ask, kill the server, ask again, and measure."""
    from openbook.client import demo as demonstration
    from openbook.client.demo_server import DemoFailed

    with one_line_errors():
        script = demonstration.read_script(document, facts, model=model)
        try:
            faults = demonstration.run(script, root=data, keep=keep, json_file=json_file)
        except DemoFailed as error:
            fail(str(error), EXIT_FAILED)
    if faults:
        fail("; ".join(faults), EXIT_FAILED)


def _ingest_ttl(text: str | None) -> float | None:
    """Read --ttl of an ingest, where the service knows no word for never."""
    if text == "never":
        raise ValueError("--ttl never is for `openbook contexts touch`, after the ingest")
    return read_ttl(text) if text is not None else None


def _budget(text: str | None) -> Budget | None:
    """Read --budget."""
    if text is None:
        return None
    if text == "exact":
        return "exact"
    try:
        return int(text)
    except ValueError:
        raise ValueError("--budget is 'exact' or a number of keys") from None


def _receipt_fields(result: Result) -> dict[str, object]:
    """Return usage, finish reason and receipt as one flat mapping."""
    return asdict(result.usage) | {"finish_reason": result.finish_reason} | asdict(result.receipt)


def add_server_verbs(to: typer.Typer) -> None:
    """Register the verbs of the group `openbook.commands`, without importing them."""
    for entry in entry_points(group=COMMANDS_GROUP):
        to.command(
            entry.name,
            help=VERB_HELP.get(entry.name, "A verb that an installed package adds."),
            add_help_option=False,  # the verb has its own
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_deferred(entry))


def _deferred(entry: EntryPoint) -> Callable[[typer.Context], None]:
    """Return a verb that imports the server's function and hands it the arguments."""

    def verb(call: typer.Context) -> None:
        try:
            server_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            server_app.command(entry.name)(entry.load())
            server_app(args=call.args, prog_name=f"openbook {entry.name}")
        except ModuleNotFoundError as error:
            fail(
                f"`openbook {entry.name}` needs the server ({error.name} is not installed): "
                "run pip install '.[server]' in a clone of the repository",
                EXIT_USAGE,
            )

    return verb


add_server_verbs(app)
