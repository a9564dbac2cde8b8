"""How long contexts are kept: the time to live of each, and when each was last used.

Owns `<data>/lives`. It knows nothing of what a context is or who removes it.

    lives/<id>.json     {"ttl_s": seconds or null, "used_unix_s": seconds}

A context expires `ttl_s` after its last use. While a server runs it counts by a clock that no one
sets: a machine's calendar may jump by hours and nothing expires early or late. The calendar only
bridges the time between two servers, and a last use in the future counts as now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openbook.server.directory import read_regular, remove, write_whole
from openbook.server.identity import is_context_id

RECORD_BYTES_MAX = 4096
TTL_S_MAX = 10 * 366 * 24 * 3600.0
SAVE_EVERY_S = 60.0  # a use is on disk this much later at most, or a tenth of the time to live
Clock = Callable[[], float]


class LifeRecord(BaseModel):
    """What is on disk of one context's life."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttl_s: float | None = Field(default=None, gt=0, le=TTL_S_MAX)
    used_unix_s: float = Field(ge=0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class _Life:
    """One context's life. `used` and `saved` are by the steady clock."""

    ttl_s: float | None
    used: float
    saved: float


class Lives:
    """The lives of one data directory. `load`, `save` and `remove` may block; the others do not."""

    def __init__(self, data: Path, *, ttl_s: float | None, calendar: Clock, steady: Clock) -> None:
        """Keep contexts `ttl_s` after their last use unless they say otherwise; None: for ever."""
        self._folder = data / "lives"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._ttl_s = ttl_s
        self._calendar = calendar
        self._steady = steady
        self._lives: dict[str, _Life] = {}

    def load(self, known: Collection[str]) -> int:
        """Read the lives of the known contexts; remove and count what belongs to none."""
        removed = 0
        for path in sorted(self._folder.iterdir()):
            content = read_regular(path, bytes_max=RECORD_BYTES_MAX)
            if path.suffix != ".json" or path.stem not in known or content is None:
                remove(path)
                removed += 1
                continue
            try:
                record = LifeRecord.model_validate_json(content)
            except ValidationError:
                continue  # as if it had none: used now
            ago_s = max(0.0, self._calendar() - record.used_unix_s)
            now = self._steady()
            self._lives[path.stem] = _Life(record.ttl_s, now - ago_s, now)
        return removed

    def set_ttl(self, context_id: str, ttl_s: float | None) -> None:
        """Set a time to live, counted from now; the caller saves it. Raises ValueError."""
        check_ttl(ttl_s)
        now = self._steady()
        self._lives[context_id] = _Life(ttl_s, now, now)

    def use(self, context_id: str) -> bool:
        """Count from now again; returns whether the caller is to save it."""
        now, life = self._steady(), self._life(context_id)
        every_s = SAVE_EVERY_S if life.ttl_s is None else min(SAVE_EVERY_S, life.ttl_s / 10)
        is_due = now - life.saved >= every_s
        self._lives[context_id] = _Life(life.ttl_s, now, now if is_due else life.saved)
        return is_due

    def save(self, context_id: str) -> None:
        """Write one life to disk; of a context removed meanwhile, nothing. Raises OSError."""
        life = self._lives.get(context_id)
        if life is None:
            return
        used_unix_s = max(0.0, self._calendar() - (self._steady() - life.used))
        record = LifeRecord(ttl_s=life.ttl_s, used_unix_s=used_unix_s)
        path = self._path(context_id)
        if path.is_dir():  # not one of ours
            remove(path)
        write_whole(path, record.model_dump_json().encode())

    def remove(self, context_id: str) -> None:
        """Forget a context. Raises OSError."""
        self._lives.pop(context_id, None)
        remove(self._path(context_id))

    def ttl_s(self, context_id: str) -> float | None:
        """Return the time to live; None: for ever."""
        return self._life(context_id).ttl_s

    def expire_unix_s(self, context_id: str) -> float | None:
        """Return when a context expires if it is not used again, by the calendar."""
        left_s = self._left_s(context_id)
        return None if left_s == math.inf else self._calendar() + left_s

    def expired(self, context_ids: Iterable[str]) -> list[str]:
        """Return those whose time is over, the longest over first."""
        over = [(self._left_s(each), each) for each in context_ids]
        return [each for left_s, each in sorted(over) if left_s <= 0]

    def by_use(self, context_ids: Iterable[str]) -> list[str]:
        """Order contexts by their last use, the longest unused first; ties by id."""
        return sorted(context_ids, key=lambda each: (self._life(each).used, each))

    def _life(self, context_id: str) -> _Life:
        if context_id not in self._lives:
            now = self._steady()
            self._lives[context_id] = _Life(self._ttl_s, now, -math.inf)
        return self._lives[context_id]

    def _left_s(self, context_id: str) -> float:
        life = self._life(context_id)
        return math.inf if life.ttl_s is None else life.ttl_s - (self._steady() - life.used)

    def _path(self, context_id: str) -> Path:
        assert is_context_id(context_id), "names come from the catalog"
        return self._folder / f"{context_id}.json"


def check_ttl(ttl_s: float | None) -> None:
    """Raise ValueError unless `ttl_s` is None or a positive number of at most ten years."""
    if ttl_s is not None and not 0 < ttl_s <= TTL_S_MAX:
        raise ValueError(f"a time to live is above 0 and at most {TTL_S_MAX:.0f} s")
