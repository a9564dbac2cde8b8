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
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from openbook.server.settings import Settings
    from openbook.server.start import Prepared

EXIT_FAILED = 1
EXIT_REFUSED = 2
LINE_MAX = 300


def serve(
    *,
    role: Annotated[
        str | None, typer.Option(help="all: one process does everything. [default: all]")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="HOST:PORT; port 0: any free one. [default: 127.0.0.1:50051]"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Directory of the contexts, made 0700. Required."),
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
    token_file: Annotated[
        str | None, typer.Option(help="File of tokens that callers must show. [default: none]")
    ] = None,
    tls_certificate: Annotated[
        str | None, typer.Option(help="PEM certificate, with --tls-key. [default: none]")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM private key. [default: none]")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Stored keys and values. [default: float16]")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="For measurement: clusters, scan or graph.")
    ] = None,
) -> None:
    """Serve contexts over gRPC.

    An address that other machines can reach needs a token and TLS.
    Every option may also be set by an environment variable: OPENBOOK_ and its name in capitals.
    Prints `openbook ready on HOST:PORT` on stdout once it answers. Stops on SIGTERM or Ctrl-C.
    """
    from openbook.server.settings import SettingsInvalid, load_settings, unknown_variables
    from openbook.server.start import StartRefused, prepared

    given = {
        "role": role, "listen": listen, "data": data, "model": model, "device": device,
        "dtype": dtype, "rope_scale": rope_scale, "threads": threads, "redis_url": redis_url,
        "kv_dtype": kv_dtype, "plan": plan, "token_file": token_file,
        "tls_certificate": tls_certificate, "tls_key": tls_key,
    }  # fmt: skip
    try:
        settings = load_settings(given)
        for name in unknown_variables(os.environ):
            print(f"openbook: {name} is not a setting; ignored", file=sys.stderr)
        with prepared(settings) as held:
            _run(settings, held)
    except (SettingsInvalid, StartRefused) as refusal:
        _tell(refusal)
        raise typer.Exit(EXIT_REFUSED) from None


def _run(settings: Settings, held: Prepared) -> NoReturn:
    """Serve, and end the process at once: unloading the model libraries takes seconds."""
    from openbook.server.start import StartRefused

    try:
        if sys.flags.optimize > 1:
            raise StartRefused("python -OO drops docstrings that transformers reads; use -O")
        from openbook.server.app import run  # after the check: this takes seconds

        code = run(settings, held)
    except StartRefused as refusal:
        _tell(refusal)
        code = EXIT_REFUSED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell(refusal: Exception) -> None:
    """Print a refusal as one line of bounded length; what a library says may have many."""
    line = " ".join(str(refusal).split())
    cut = line if len(line) <= LINE_MAX else f"{line[: LINE_MAX - 1]}…"
    print(f"openbook: {cut}", file=sys.stderr)
