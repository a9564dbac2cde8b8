"""Verbs that look before anything is read: `openbook count`, `capacity` and `doctor`.

Knows: options. Does not know: how the figures come about.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openbook.client.capacity import capacity as capacity_of
from openbook.client.capacity import stored_bytes
from openbook.client.cli_options import (
    Server,
    connect,
    document_of,
    read_size,
    tls_of_environment,
)
from openbook.client.console import (
    EXIT_FAILED,
    fail,
    one_line_errors,
    print_fields,
    printable,
    size,
)
from openbook.client.errors import OpenbookError
from openbook.client.interrupts import EXIT_INTERRUPTED, interruptible, is_interrupted
from openbook.client.views import Layout

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@interruptible
def count(
    file: Annotated[Path, typer.Argument(help="A UTF-8 text file; - reads standard input.")],
    server: Server = "localhost:50051",
    layout: Annotated[
        Layout | None, typer.Option(help="As of ingest.", show_default="as of ingest")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a document would cost, without reading it."""
    with one_line_errors(server), connect(server) as client:
        cost = client.count_tokens(document_of(file), layout=layout)
    if as_json:
        print(json.dumps(asdict(cost)))
        return
    fields: dict[str, object] = {
        "tokens": cost.tokens,
        "keys and values, 16 bit": size(cost.kv_bytes),
        "on disk, about": size(stored_bytes(cost.kv_bytes)),
    }
    print_fields(fields, Console())


@interruptible
def capacity(
    tokens: Annotated[int, typer.Option(help="Tokens of one context; see `openbook count`.")],
    server: Server = "localhost:50051",
    memory: Annotated[str | None, typer.Option(help="Such as 16GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Such as 500GB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the bytes of a context under the served model, and how many contexts fit.

    Stored bytes are about 1.3 times those of the keys and values; how many fit is rounded down.
    """
    with one_line_errors(server):
        memory_bytes = read_size(memory, "--memory") if memory is not None else None
        disk_bytes = read_size(disk, "--disk") if disk is not None else None
        with connect(server) as client:
            model = client.models()[0]
        found = capacity_of(model, tokens, memory_bytes=memory_bytes, disk_bytes=disk_bytes)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    fields: dict[str, object] = {
        "model": model.name,
        "tokens": tokens,
        "keys and values, 16 bit": size(found.kv_bytes),
        "on disk, about": size(found.stored_bytes),
    }
    if found.fit_in_memory is not None:
        fields[f"contexts in {memory} of memory"] = f"{found.fit_in_memory} (rounded down)"
    if found.fit_on_disk is not None:
        fields[f"contexts on {disk} of disk"] = f"{found.fit_on_disk} (rounded down)"
    print_fields(fields, Console())


@interruptible
def doctor(
    server: Server = "localhost:50051",
    data: Annotated[
        Path | None,
        typer.Option(help="Look at this data directory and this machine, too."),
    ] = None,
) -> None:
    """Look whether all is well: a line each, and exit code 1 if something is not."""
    from openbook.client import doctor as examination  # of POSIX alone, as is the server

    def told(findings: Iterable[examination.Finding]) -> bool:
        """Print findings, and return whether all are in order."""
        is_ok = True
        for finding in findings:
            print(" ".join(printable(str(finding)).split()), flush=True)
            is_ok = is_ok and finding.is_ok
        return is_ok

    with one_line_errors(server), connect(server) as client:
        tls = tls_of_environment()
        is_ok = told(examination.examine_service(client, server, tls=tls))
        if data is not None:
            try:
                models = client.models()
            except OpenbookError:  # which was told above
                models = ()
            is_ok = told(examination.examine_data(data, models)) and is_ok
    if is_interrupted():
        fail("interrupted", EXIT_INTERRUPTED)
    if not is_ok:
        raise typer.Exit(EXIT_FAILED)
