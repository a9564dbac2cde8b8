"""The command line verb `serve`.

Owns flags, exit codes and the lines a person reads. It knows nothing of how a server is built.
The client's CLI loads this module for its help, so nothing heavy is imported at its top: the
model libraries alone take seconds.

Exit codes: 0 after a drained stop, 1 when the server failed while running, 2 when it could not
start as told (settings, data directory, address, model); each with one line on stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_FAILED = 1
EXIT_REFUSED = 2


def serve(
    *,
    role: Annotated[
        str | None, typer.Option(help="all: one process does everything. [default: all]")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Loopback HOST:PORT; port 0: any free one. [default: 127.0.0.1:50051]"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of the contexts; made with mode 0700. Required.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id, directory, or GGUF file of the model. Required."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs. [default: cpu]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16. [default: float32]")
    ] = None,
    rope_scale: Annotated[
        float | None, typer.Option(help="Stretch the model's positions by this factor.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of model and search. [default: every core it may use]"),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="redis://, rediss:// or unix:// URL. [default: an embedded Valkey]"),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Stored keys and values. [default: float16]")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="For measurement: force scan or graph on every head.")
    ] = None,
) -> None:
    """Serve contexts over gRPC on a loopback address.

    Every option may also be set by an environment variable: OPENBOOK_ and its name in capitals.
    Prints `openbook ready on HOST:PORT` on stdout once it answers. Stops on SIGTERM or Ctrl-C.
    """
    from openbook.server.app import StartRefused, run
    from openbook.server.settings import SettingsInvalid, load_settings, unknown_variables

    given = {
        "role": role, "listen": listen, "data": data, "model": model, "device": device,
        "dtype": dtype, "rope_scale": rope_scale, "threads": threads, "redis_url": redis_url,
        "kv_dtype": kv_dtype, "plan": plan,
    }  # fmt: skip
    try:
        settings = load_settings(given)
        for name in unknown_variables(os.environ):
            print(f"openbook: {name} is not a setting; ignored", file=sys.stderr)
        code = run(settings)
    except (SettingsInvalid, StartRefused) as refusal:
        print(f"openbook: {refusal}", file=sys.stderr)
        raise typer.Exit(EXIT_REFUSED) from None
    raise typer.Exit(code)
