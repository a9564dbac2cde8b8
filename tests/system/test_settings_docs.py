"""docs/SETTINGS.md lists what may be set, with its default, range and flag, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic.fields import FieldInfo

from openbook.server.commands import serve
from openbook.server.settings import CLIENT_VARIABLES, ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "SETTINGS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TITLES = ("The server", "The client", "Where models are kept", "Compose")


def rows(title: str) -> dict[str, list[str]]:
    """Return the cells after the first of each row of a section's table, by the first."""
    section = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip("` "): rest for first, *rest in cells}


def plain(cell: str) -> str:
    return cell.replace("`", "").replace(",", "")


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "every core it may use"
    return "none" if field.default is None else f"{field.default}".removesuffix(".0")


def range_of(field: FieldInfo) -> str | None:
    """Return the range that the field's type or bounds give, or None where neither does."""
    annotation: Any = field.annotation
    options = [get_args(choice) for choice in (annotation, *get_args(annotation))]
    for choices in options:
        if choices and all(isinstance(choice, str) for choice in choices):
            return " ".join(choices)
    bounds = {
        name: getattr(each, name)
        for each in field.metadata
        for name in ("ge", "gt", "le")
        if hasattr(each, name)
    }
    if "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    if "gt" in bounds:
        return f"above {bounds['gt']}"
    return f"at least {bounds['ge']}" if "ge" in bounds else None


def test_every_setting_is_listed_and_nothing_else() -> None:
    names = [f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields]
    assert list(rows("The server")) == names
    assert set(rows("The client")) == CLIENT_VARIABLES


def test_every_name_on_the_page_is_a_setting_or_composes_own() -> None:
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | CLIENT_VARIABLES
    compose = set(rows("Compose"))
    assert set(re.findall(r"`(OPENBOOK_[A-Z_]*[A-Z])`", TEXT)) == known | compose
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    given = dict(re.findall(r"\$\{(OPENBOOK_\w+):-([^}]*)\}", text))
    assert {name: plain(cells[0]) for name, cells in rows("Compose").items()} == {
        name: value for name, value in given.items() if name != "OPENBOOK_LISTEN"
    }
    assert yaml.safe_load(text)["services"]["openbook"]["environment"]["OPENBOOK_LISTEN"]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_default_range_and_flag_are_the_settings_own(name: str) -> None:
    field = Settings.model_fields[name]
    flag, default, bounds, meaning = rows("The server")[f"{ENV_PREFIX}{name.upper()}"]
    has_flag = name in inspect.signature(serve).parameters
    assert flag == (f"`--{name.replace('_', '-')}`" if has_flag else "–")
    assert plain(default) == default_of(field)
    expected = range_of(field)
    assert bounds and (expected is None or plain(bounds) == expected)
    assert meaning.endswith(".")


def test_readme_links_the_page_and_its_sections_are_known() -> None:
    assert "(docs/SETTINGS.md)" in README
    assert tuple(re.findall(r"^## (.*)$", TEXT, re.MULTILINE)) == TITLES
