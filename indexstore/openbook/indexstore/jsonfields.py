"""Reading single values out of parsed JSON that nobody vouches for.

Each function returns the value with its type, or raises ValueError saying what was expected and
never what was found. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a key twice: a hook for json."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("duplicate keys")
    return fields


def no_constant(name: str) -> Any:
    """Refuse NaN and the infinities: a hook for json."""
    raise ValueError(f"{name} is not a number here")


def exactly(fields: Mapping[str, Any], names: set[str], where: str) -> None:
    """Check that an object has these keys and no others."""
    if fields.keys() != names:
        missing, unknown = names - fields.keys(), len(fields.keys() - names)
        raise ValueError(f"{where}: missing {sorted(missing)}, {unknown} unknown keys")


def an_object(value: Any, name: str) -> dict[str, Any]:
    """Return an object."""
    if type(value) is not dict:
        raise ValueError(f"{name} is not an object")
    return value


def a_list(fields: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    """Return a field that is a list, of `length` if given."""
    value = fields.get(name)
    if type(value) is not list or length not in (None, len(value)):
        raise ValueError(f"{name} is not a list" + ("" if length is None else f" of {length}"))
    return value


def an_int(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a field that is a whole number in low..high (True is none)."""
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is not a whole number from {low} to {high}")
    return value


def a_real(value: Any, name: str) -> float:
    """Return a finite number that was written with a point."""
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{name} holds something that is not a finite number")
    return value


def a_string(fields: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    """Return a field that is a string of the pattern's form."""
    value = fields.get(name)
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise ValueError(f"{name} is not a string of the form {pattern.pattern}")
    return value


def one_of(fields: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    """Return a field that is one of the choices."""
    value = fields.get(name)
    if type(value) is not str or value not in choices:
        raise ValueError(f"{name} is not one of {', '.join(choices)}")
    return value
