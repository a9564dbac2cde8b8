"""Verbs that look before anything is read: `openbook count`.

Knows: options. Does not know: how the figures come about.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from openbook.client.cli_options import Server, connect
from openbook.client.console import one_line_errors, print_fields, size
from openbook.client.views import Layout

STORED_SHARE = 2  # bytes stored for one byte of 16-bit keys and values, about


def count(
    file: Annotated[Path, typer.Argument(help="A UTF-8 text file; - reads standard input.")],
    server: Server = "localhost:50051",
    layout: Annotated[
        Layout | None, typer.Option(help="As of ingest.", show_default="as of ingest")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a document would cost, without reading it."""
    document = sys.stdin.buffer if str(file) == "-" else file
    with one_line_errors(server), connect(server) as client:
        cost = client.count_tokens(document, layout=layout)
    if as_json:
        print(json.dumps(asdict(cost)))
        return
    fields: dict[str, object] = {
        "tokens": cost.tokens,
        "keys and values, 16 bit": size(cost.kv_bytes),
        "on disk, about": size(STORED_SHARE * cost.kv_bytes),
    }
    print_fields(fields, Console())
