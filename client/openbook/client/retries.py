"""Which calls are tried again, how often, and after which pause.

A call is tried again when the service is UNAVAILABLE, where doing it twice does no harm: lookups,
counting, an ask before its first piece, a watch, and an ingest, whose document can be read again.
gRPC itself repeats what is small and has not been answered in part (SERVICE_CONFIG); an upload
outgrows the buffer it would repeat from, and a watch may break after its first message, so the
clients repeat these two, by `Tries`. Never repeated: delete, update, verify and reindex, and an
answer of which a piece has come.

Knows: gRPC's statuses. Does not know: channels, or whether a pause blocks or is awaited.
"""

import json
import random

import grpc

from openbook.client.errors import from_rpc
from openbook.client.requests import Deadline

TRIES_MAX = 3
PAUSE_S = 0.1  # before the second try; twice that before the third
PAUSE_S_MAX = 2.0
SERVICE = "openbook.v1.ContextService"
REPEATED_BY_GRPC = ("GetContext", "ListContexts", "ListModels", "CountTokens", "Ask")
SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": SERVICE, "method": method} for method in REPEATED_BY_GRPC],
                "retryPolicy": {  # gRPC varies the pauses by itself
                    "maxAttempts": TRIES_MAX,
                    "initialBackoff": f"{PAUSE_S}s",
                    "maxBackoff": f"{PAUSE_S_MAX}s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


class Tries:
    """The tries of one call, within what is left of a timeout."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._made = 0

    def pause_s(self, error: grpc.RpcError) -> float:
        """Return the seconds to wait before the next try.

        Raises the error, translated, when there is to be none.
        """
        self._made += 1
        most = min(PAUSE_S * 2 ** (self._made - 1), PAUSE_S_MAX)
        pause_s = random.uniform(most / 2, most)  # so that many callers do not come back as one
        is_away = getattr(error, "code", lambda: None)() == grpc.StatusCode.UNAVAILABLE
        if not is_away or self._made >= TRIES_MAX or not self._deadline.allows(pause_s):
            raise from_rpc(error) from error
        return pause_s
