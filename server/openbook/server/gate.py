"""Who may call.

Owns the check of a caller's token. It knows nothing of what a call does. Without a token whoever
reaches the address may call, so that address is this machine's own (settings.py). A token is never
logged, and no answer shows how much of a wrong one was right.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from openbook.server.errors import Unauthenticated


class Gate:
    """Lets in callers with the token; without one, everybody."""

    def __init__(self, token: bytes | None) -> None:
        self._expected = None if token is None else b"Bearer " + token

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Raise Unauthenticated unless the call's metadata carry the token, and only that."""
        if self._expected is None:
            return
        given = [value for name, value in metadata or () if name == "authorization"]
        if len(given) != 1:
            raise Unauthenticated()
        value = given[0].encode() if isinstance(given[0], str) else given[0]
        if not hmac.compare_digest(value, self._expected):
            raise Unauthenticated()
