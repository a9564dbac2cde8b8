"""What can keep a server from starting, found before the model libraries are loaded.

Owns the order of these checks: address, tokens and certificate, data directory, secret. The
libraries alone take seconds, and a person who mistyped a path should not wait for them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from openbook.server.access import AccessRefused, load_certificate, load_tokens
from openbook.server.directory import DataDirectoryRefused, open_data_directory
from openbook.server.identity import load_secret
from openbook.server.settings import Settings


class StartRefused(Exception):
    """The server cannot start as told; the text is for a person."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a server needs besides its settings: secrets, all of it.

    Without tokens everybody may call. `certificate` is the private key and the chain, PEM.
    """

    secret: bytes
    tokens: tuple[bytes, ...] = ()
    certificate: tuple[bytes, bytes] | None = None


@contextmanager
def prepared(settings: Settings) -> Iterator[Prepared]:
    """Hold the data directory and read what is secret. Raises StartRefused."""
    os.umask(0o077)
    check_address(settings.listen)
    try:
        tokens = load_tokens(settings.token_file) if settings.token_file else ()
        certificate = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            certificate = load_certificate(settings.tls_certificate, settings.tls_key)
    except AccessRefused as error:
        raise StartRefused(str(error)) from error
    try:
        lock = open_data_directory(settings.data)
    except DataDirectoryRefused as error:
        raise StartRefused(str(error)) from error
    with lock:
        try:
            secret = load_secret(settings.data)
        except DataDirectoryRefused as error:
            raise StartRefused(str(error)) from error
        yield Prepared(secret, tokens, certificate)


def check_address(listen: str) -> None:
    """Raise StartRefused when the address cannot be bound now; another may still be faster."""
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise address_refused(listen) from error


def address_refused(listen: str) -> StartRefused:
    """Return what a person reads of an address that cannot be bound."""
    return StartRefused(f"the address {listen} cannot be bound; is it in use?")
