"""Who may call.

Owns the check of a caller's token, and who counts as one caller. It knows nothing of what a call
does. Without a token whoever reaches the address may call, so that address is this machine's own
(settings.py). Every token opens the same contexts. Where there are several, a caller is a token,
over however many connections; else everybody shows the same, and a caller is a connection. A token
is never logged, and no answer shows how much of a wrong one was right.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from openbook.server.errors import Unauthenticated


class Gate:
    """Lets in callers with one of the tokens; where there are none, everybody."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._expected = [b"Bearer " + token for token in tokens]

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None, *, peer: str) -> str:
        """Return who calls: which token, where there are several, else `peer`, the connection.

        Raises Unauthenticated unless the call's metadata carry a token, and only that.
        """
        if not self._expected:
            return peer
        given = [value for name, value in metadata or () if name == "authorization"]
        if len(given) != 1:
            raise Unauthenticated()
        value = given[0].encode() if isinstance(given[0], str) else given[0]
        shown = [n for n, token in enumerate(self._expected) if hmac.compare_digest(value, token)]
        if not shown:
            raise Unauthenticated()
        return f"token {shown[0]}" if len(self._expected) > 1 else peer
