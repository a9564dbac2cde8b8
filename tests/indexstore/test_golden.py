"""Contexts written by every version of the format are read, bit for bit, for as long as it says."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from openbook.indexstore.errors import FormatUnsupported
from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.layout import FORMAT_OLDEST, FORMAT_VERSION
from openbook.indexstore.store import open_context, read_manifest, read_summary
from openbook.indexstore.verify import verify_context

DATA = Path(__file__).parent.parent / "data"
HEAD_RECORDS = {1: 12, 2: 12}  # of a head without a graph, in format 2
READABLE = range(FORMAT_OLDEST, FORMAT_VERSION + 1)


def golden(version: int, into: Path) -> Path:
    """Unpack the golden context of a format version."""
    with tarfile.open(DATA / f"golden-v{version}.tar.gz") as archive:
        archive.extractall(into, filter="data")
    return into / f"golden-v{version}"


def described(array: Any) -> str:
    return f"{array.dtype.str} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


@pytest.mark.parametrize("version", READABLE)
def test_golden_context_reads_bit_for_bit(tmp_path: Path, version: int) -> None:
    path = golden(version, tmp_path)
    with open_context(path, model_fingerprint="sha256:model-a") as context:
        assert context.manifest.format_version == version
        found = {"tokens": described(context.token_ids), "offsets": described(context.offsets)}
        for layer in range(context.manifest.layers):
            for kind, head, array in layer_arrays(context.layer(layer)):
                name = f"{layer}/{kind.label}" + ("" if head is None else f"/{head}")
                found[name] = described(array)
    assert found == json.loads((DATA / f"golden-v{version}.json").read_text())
    assert len(found) == 2 + 2 * (7 + HEAD_RECORDS[version])


@pytest.mark.parametrize("version", READABLE)
def test_golden_context_still_answers_its_probes(tmp_path: Path, version: int) -> None:
    report = verify_context(golden(version, tmp_path))
    assert report.records_checked == 2 + 2 * (7 + HEAD_RECORDS[version])
    assert report.probes_checked == 12


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_OLDEST - 1])
def test_version_that_is_not_read_is_refused_with_both_numbers(
    tmp_path: Path, forger: Any, version: int
) -> None:
    path = golden(FORMAT_VERSION, tmp_path)
    forger.manifest(path, lambda whole: whole["fields"].update(format_version=version))
    for read in (
        read_manifest,
        read_summary,
        verify_context,
        lambda path: open_context(path, model_fingerprint=None),
    ):
        with pytest.raises(FormatUnsupported) as caught:
            read(path)
        assert (caught.value.found, caught.value.newest) == (version, FORMAT_VERSION)
        assert f"format {version} " in str(caught.value)
        assert f"reads {FORMAT_OLDEST} to {FORMAT_VERSION}" in str(caught.value)
