"""Options that several verbs share, and the client that they describe.

Knows: --server and the environment. The token is read from OPENBOOK_TOKEN alone: an option would
show it to everyone who can list processes.
"""

import os
from typing import Annotated

import typer

from openbook.client.client import Client

Server = Annotated[str, typer.Option(envvar="OPENBOOK_SERVER", help="host:port of the service.")]


def connect(server: str) -> Client:
    """Return a client of `server` with the token of the environment, if there is one."""
    return Client(server, token=os.environ.get("OPENBOOK_TOKEN") or None)
