"""The files that decide who may call: the tokens, the certificate and its key.

Owns what is taken for one. It knows nothing of calls (gate.py) and imports nothing that takes long:
a start that must be refused is refused at once.
"""

from __future__ import annotations

import re
import ssl
import stat
from pathlib import Path

from openbook.server.directory import read_regular

TOKEN = re.compile(rb"[!-~]{32,512}")  # what a header may carry; too long to be guessed
TOKENS_MAX = 256  # each call is held against every one
FILE_BYTES_MAX = 1 << 20


class AccessRefused(Exception):
    """A token or certificate cannot be used; the text is one line for a person."""


def load_tokens(path: Path) -> tuple[bytes, ...]:
    """Return the tokens in a file, one a line, white space around them dropped.

    Raises AccessRefused, which names a line by its number.
    """
    lines = _secret_file(path, "token file").splitlines()
    tokens = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    for number, token in tokens.items():
        if TOKEN.fullmatch(token) is None:
            raise AccessRefused(
                f"line {number} of {path} must be a token of 32 to 512 printable ASCII characters"
            )
    if not 1 <= len(tokens) <= TOKENS_MAX:
        raise AccessRefused(f"{path} must hold 1 to {TOKENS_MAX} tokens, one a line")
    if len(set(tokens.values())) < len(tokens):
        raise AccessRefused(f"{path} holds a token twice; each stands for another caller")
    return tuple(tokens.values())


def load_certificate(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Return the private key and the chain of two PEM files.

    Raises AccessRefused where they are damaged or do not belong together, too: gRPC would say so
    only when it binds the address, after the model is loaded.
    """
    private = _secret_file(key, "key")
    chain = _file(certificate, "certificate")
    if b"PRIVATE KEY-----" not in private or b"-----BEGIN CERTIFICATE-----" not in chain:
        raise AccessRefused(f"{certificate} and {key} must be a PEM certificate and its key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate.resolve(),
            key.resolve(),
            password="",  # an encrypted key is refused: nobody is asked on the terminal
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        known = getattr(error, "reason", None)
        why = known.lower().replace("_", " ") if known else "one is damaged, or the key encrypted"
        raise AccessRefused(f"{certificate} and {key} cannot serve as a pair: {why}") from error
    return private, chain


def _secret_file(path: Path, what: str) -> bytes:
    content = _file(path, what)
    if stat.S_IMODE(path.stat().st_mode) & 0o037:
        raise AccessRefused(f"the {what} {path} is open to other users; run: chmod 600 {path}")
    return content


def _file(path: Path, what: str) -> bytes:
    try:
        content = read_regular(path.resolve(), bytes_max=FILE_BYTES_MAX)  # mounts are often links
    except OSError as error:
        raise AccessRefused(f"the {what} {path} cannot be read: {error.strerror}") from error
    if content is None:
        raise AccessRefused(f"the {what} {path} is not a regular file, or far too large")
    return content
