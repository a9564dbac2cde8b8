"""`openbook contexts`: list, show, touch, verify, reindex and delete.

Knows: options. Does not know: how a context is stored.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from openbook.client.cli_options import Server, connect, read_ttl
from openbook.client.console import (
    moment,
    one_line_errors,
    one_line_json,
    print_contexts,
    print_fields,
    size,
)
from openbook.client.interrupts import interruptible
from openbook.client.views import ContextInfo

ContextId = Annotated[str, typer.Argument(metavar="ID", help="The id that ingest printed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")]

contexts_app = typer.Typer(
    help="List, show, keep, check and delete what the service has read.", no_args_is_help=True
)


@contexts_app.command("list")
@interruptible
def list_contexts(server: Server = "localhost:50051", as_json: AsJson = False) -> None:
    """List the contexts, newest first: a table, or tab-separated lines where it is piped."""
    with one_line_errors(server), connect(server) as client:
        contexts = list(client.contexts())
    if as_json:
        for info in contexts:
            print(_json(info))
    else:
        print_contexts(contexts, Console(), now=datetime.now(UTC))


@contexts_app.command()
@interruptible
def show(
    context_id: ContextId, server: Server = "localhost:50051", as_json: AsJson = False
) -> None:
    """Show one context."""
    with one_line_errors(server), connect(server) as client:
        info = client.context(context_id)
    if as_json:
        print(_json(info))
    else:
        print_fields(_fields(info), Console())


@contexts_app.command()
@interruptible
def touch(
    context_id: ContextId,
    ttl: Annotated[
        str, typer.Option(help="7d, 12h, 30m or 3600 (seconds), or never: keep it for ever.")
    ],
    server: Server = "localhost:50051",
) -> None:
    """Keep a context for a time from now and from every later use; print when it expires."""
    with one_line_errors(server), connect(server) as client:
        info = client.update(context_id, ttl=read_ttl(ttl))
    print(moment(info.expires) or "never")


@contexts_app.command()
@interruptible
def verify(
    context_id: ContextId, server: Server = "localhost:50051", as_json: AsJson = False
) -> None:
    """Read every stored byte of a context and answer its stored queries again."""
    with one_line_errors(server), connect(server) as client:
        verification = client.verify(context_id)
    if as_json:
        print(json.dumps(asdict(verification)))
    else:
        print_fields(asdict(verification), Console())


@contexts_app.command()
@interruptible
def reindex(
    context_id: ContextId, server: Server = "localhost:50051", as_json: AsJson = False
) -> None:
    """Build a context's indexes anew from what is stored, without the model."""
    with one_line_errors(server), connect(server) as client:
        info = client.reindex(context_id)
    if as_json:
        print(_json(info))
    else:
        print_fields(_fields(info), Console())


@contexts_app.command()
@interruptible
def delete(
    context_ids: Annotated[list[str], typer.Argument(metavar="ID...")],
    server: Server = "localhost:50051",
) -> None:
    """Delete contexts; stops at the first that cannot be deleted."""
    with one_line_errors(server), connect(server) as client:
        for context_id in context_ids:
            client.delete(context_id)


def _fields(info: ContextInfo) -> dict[str, object]:
    """Return what a person wants to see of a context."""
    fields: dict[str, object] = {
        "id": info.id,
        "name": info.display_name,
        "model": info.model,
        "state": info.state,
        "layout": info.layout,
        "tokens": info.token_count,
        "on disk": size(info.bytes_on_disk),
        "keys and values, 16 bit": size(info.kv_bytes_16bit),
        "created": moment(info.created),
        "expires": moment(info.expires) or "never",
    }
    if info.state == "creating":
        fields["progress"] = info.progress
    if info.state == "failed":
        fields["error"] = f"{info.error_reason}: {info.error_message}"
    return fields


def _json(info: ContextInfo) -> str:
    """Return a context as one line of JSON; times are ISO 8601."""
    return one_line_json(asdict(info))
