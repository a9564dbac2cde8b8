"""How much one caller may have under way, so that none can take every place of the others.

Owns the counts of calls. It knows nothing of what a call does, nor who counts as one caller
(gate.py). The limits of all callers together are their owners' own (decode_worker.py, ingests.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from openbook.server.errors import CallerLimitReached


class Callers:
    """Counts the calls under way of each caller.

    `calls_max` bounds them all together, `most` those of a method by its name.
    """

    def __init__(self, *, calls_max: int, most: Mapping[str, int]) -> None:
        self._calls_max = calls_max
        self._most = most
        self._under_way: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def calling(self, caller: str, method: str) -> Iterator[None]:
        """Count a call from its beginning to its end. Raises CallerLimitReached."""
        places = {(caller, ""): self._calls_max}
        if method in self._most:
            places[caller, method] = self._most[method]
        for place, limit in places.items():
            if self._under_way[place] >= limit:
                what = f"calls of {method} under way" if place[1] else "calls under way"
                raise CallerLimitReached(limit, what=what)
        self._under_way.update(places.keys())
        try:
            yield
        finally:
            self._under_way.subtract(places.keys())
            for place in places:
                if not self._under_way[place]:
                    del self._under_way[place]  # callers come and go: only those that call are kept
