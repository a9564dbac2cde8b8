"""A manifest is canonical, carries its own digest, and is believed in nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openbook.indexstore.canonical import decode, decode_summary, encode
from openbook.indexstore.errors import FormatUnsupported, ShardCorrupt
from openbook.indexstore.head import HeadPlan
from openbook.indexstore.layout import FORMAT_VERSION
from openbook.indexstore.manifest import Manifest, Summary

PROCESS = Path(__file__).with_name("store_process.py")


@pytest.fixture
def raw(manifest_bytes: bytes) -> bytes:
    return manifest_bytes


def test_manifest_reads_back_and_writes_the_same_bytes(raw: bytes, maker: Any) -> None:
    manifest = decode(raw)
    assert encode(manifest) == raw
    for name, value in ((f, getattr(maker.fields(), f)) for f in maker.fields().__slots__):
        assert getattr(manifest, name) == value, name
    assert manifest.format_version == FORMAT_VERSION
    assert [file.name for file in manifest.files] == [
        "tokens.mdb",
        "layer-000.mdb",
        "layer-001.mdb",
    ]
    assert manifest.bytes_total == sum(file.bytes for file in manifest.files)


def test_summary_is_the_manifest_without_its_files(raw: bytes) -> None:
    manifest, summary = decode(raw), decode_summary(raw)
    assert type(summary) is Summary and isinstance(manifest, Manifest)
    for name in (*Summary.__mro__[1].__slots__, *Summary.__slots__):
        assert getattr(summary, name) == getattr(manifest, name)


def test_lift_is_written_only_where_there_is_one(maker: Any) -> None:
    heads = (HeadPlan("clusters", 200, (0.0, 0.25), 1.75), HeadPlan("graph", 64))
    with maker.draft(maker.fields(plan=(heads, heads))) as draft:
        raw = (draft.path / "manifest.json").read_bytes()
    assert json.loads(raw)["fields"]["plan"][0] == [
        {"kind": "clusters", "lift": [0.0, 0.25], "queue": 200, "reach": 1.75},
        {"kind": "graph", "queue": 64},
    ]
    assert decode(raw).plan == (heads, heads) and encode(decode(raw)) == raw


def test_manifest_is_canonical_json(raw: bytes) -> None:
    whole = json.loads(raw)
    assert list(whole) == ["fields", "files", "sha256"]
    assert list(whole["fields"]) == sorted(whole["fields"])
    assert raw.isascii() and raw.endswith(b'"}\n') and b" " not in raw


def test_every_flip_of_a_bit_is_found(raw: bytes) -> None:
    rng = random.Random(1)
    positions = [0, 1, 9, 10, len(raw) - 1, len(raw) - 2, len(raw) - 70]
    positions += [rng.randrange(len(raw)) for _ in range(400)]
    for position in positions:
        damaged = bytearray(raw)
        damaged[position] ^= 1 << rng.randrange(8)
        for read in (decode, decode_summary):
            with pytest.raises(ShardCorrupt):
                read(bytes(damaged))


def test_every_cut_is_found(raw: bytes) -> None:
    for length in [*range(0, len(raw), 97), len(raw) - 1]:
        with pytest.raises(ShardCorrupt):
            decode(raw[:length])
    with pytest.raises(ShardCorrupt):
        decode(raw + b"\n")


def set_field(name: str, value: Any) -> Callable[[Any], None]:
    return lambda whole: whole["fields"].__setitem__(name, value)


def set_file(name: str, value: Any) -> Callable[[Any], None]:
    return lambda whole: whole["files"][1].__setitem__(name, value)


def set_record(name: str, value: Any) -> Callable[[Any], None]:
    return lambda whole: whole["files"][1]["records"][-1].__setitem__(name, value)


LIFTS: list[Any] = [[], [0.1], [0.1, 0], [0.1, 1.5], [0.1, -0.1], [0.1, "0.1"], 0.1, None]
HOSTILE_NUMBERS = [-1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, True, "7", None, [], {}]


@pytest.mark.parametrize("value", HOSTILE_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "name", ["token_count", "layers", "query_heads", "kv_heads", "head_dim", "value_dim"]
)
def test_hostile_number_is_refused(raw: bytes, forger: Any, name: str, value: Any) -> None:
    forged = forger.edited(raw, set_field(name, value))
    with pytest.raises(ShardCorrupt, match=r"^manifest\.json: "):
        decode(forged)


@pytest.mark.parametrize(
    "edit",
    [
        set_field("created_unix_s", -1),
        set_field("created_unix_s", 1e9),
        set_field("kv_bytes_16bit", 2**63),
        set_field("bytes_total", 0),
        set_field("bytes_total", 2**63),
        set_field("context_id", ""),
        set_field("context_id", "../../etc/passwd"),
        set_field("context_id", "a" * 200),
        set_field("model_fingerprint", "two words"),
        set_field("model_fingerprint", 3),
        set_field("model_name", "\x1b[31mred"),
        set_field("model_name", "\ud800"),
        set_field("prompt_layout", None),
        set_field("kv_dtype", "int8"),
        set_field("kv_dtype", "float32"),  # the records say float16
        set_field("kv_dtype", ["float16"]),
        set_field("query_heads", 5),
        set_field("kv_heads", 1),
        set_field("token_count", 701),
        set_field("scaling", [0.25]),
        set_field("scaling", [0.25, "0.5"]),
        set_field("scaling", [1, 1]),
        set_field("plan", []),
        set_field("plan", [[], []]),
        set_field("plan", [[{"kind": "scan", "queue": 0}] * 3] * 2),
        set_field("plan", [[{"kind": "guess", "queue": 0}] * 2] * 2),
        set_field("plan", [[{"kind": "scan", "queue": -1}] * 2] * 2),
        set_field("plan", [[{"kind": "scan"}] * 2] * 2),
        set_field("plan", [[{"kind": "scan", "queue": 0, "reach": 1.0}] * 2] * 2),
        set_field("plan", [[{"kind": "clusters", "queue": 200}] * 2] * 2),
        set_field("plan", [[{"kind": "clusters", "queue": 200, "reach": -0.5}] * 2] * 2),
        set_field("plan", [[{"kind": "clusters", "queue": 200, "reach": 1}] * 2] * 2),
        *(
            set_field("plan", [[{"kind": "scan", "lift": lift, "queue": 0}] * 2] * 2)
            for lift in LIFTS
        ),
        set_field("stages_s", {}),
        set_field("stages_s", [1.0]),
        set_field("stages_s", {"tokenize": -1.0, "prefill": 0.0, "build": 0.0, "write": 0.0}),
        set_field("model_parts", []),
        set_field("model_parts", {"weights": 7}),
        set_field("model_parts", {"weights": "a b"}),
        set_field("model_parts", {"we ights": "a"}),
        set_field("model_parts", {f"part{i}": "a" for i in range(33)}),
        set_field("created_unix_s", 253_402_300_800),
        set_field("unknown", 1),
        lambda whole: whole["fields"].pop("layers"),
        lambda whole: whole.update(more=1),
        lambda whole: whole.update(fields=[]),
        lambda whole: whole.update(files={}),
        lambda whole: whole["files"].pop(),
        lambda whole: whole["files"].reverse(),
        lambda whole: whole["files"].append(whole["files"][0]),
        set_file("name", "../layer-000.mdb"),
        set_file("name", "layer-001.mdb"),
        set_file("bytes", 0),
        set_file("bytes", -4096),
        set_file("bytes", 2**63),
        set_file("chunks", []),
        set_file("chunks", ["0" * 63]),
        set_file("chunks", [7]),
        set_file("records", []),
        lambda whole: whole["files"][1]["records"].reverse(),
        set_record("kind", "tokens"),
        set_record("kind", "soup"),
        set_record("head", 0),
        set_record("head", -1),
        set_record("head", 2**63),
        set_record("dtype", "float64"),
        set_record("shape", [-60]),
        set_record("shape", [2**63]),
        set_record("shape", [61]),
        set_record("shape", [60, 1]),
        set_record("shape", [1, 1, 1, 1]),
        set_record("shape", 60),
        set_record("sha256", "z" * 64),
        set_record("sha256", None),
        set_record("extra", 0),
    ],
)
def test_forged_manifest_is_refused(raw: bytes, forger: Any, edit: Callable[[Any], None]) -> None:
    forged = forger.edited(raw, edit)
    with pytest.raises(ShardCorrupt, match=r"^manifest\.json: "):
        decode(forged)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"layers":2', '"layers":2,"layers":2'),
        lambda text: text.replace('"layers":2', '"layers": 2'),
        lambda text: text.replace('"layers":2', '"layers":02'),
        lambda text: text.replace("[0.25,", "[NaN,"),
        lambda text: text.replace("[0.25,", "[Infinity,"),
        lambda text: text.replace("[0.25,", "[1e999,"),
        lambda text: text.replace("[0.25,", "[0.250,"),
        lambda text: text.replace("test/model", "test\\u002fmodel"),
        lambda text: '{"fields":' + "[" * 100_000 + "}",
        lambda text: '{"fields":1}',
        lambda text: '{"fields":{}}',
        lambda text: '{"fields":' + "9" * 5000 + "}",
    ],
)
def test_text_that_would_not_be_written_is_refused(
    forger: Any, raw: bytes, change: Callable[[str], str]
) -> None:
    whole = json.loads(raw)
    del whole["sha256"]
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    assert change(text) != text
    forged = forger.digested(change(text))
    with pytest.raises(ShardCorrupt, match=r"^manifest\.json: "):
        decode(forged)


@pytest.mark.parametrize("read", [decode, decode_summary])
def test_key_that_is_there_twice_is_refused(raw: bytes, forger: Any, read: Any) -> None:
    text = raw.decode()[: -len(',"sha256":""}') - 65] + "}"
    twice = text.replace('"layers":2', '"layers":2,"layers":2', 1)
    with pytest.raises(ShardCorrupt, match="duplicate"):
        read(forger.digested(twice))


@pytest.mark.parametrize("read", [decode, decode_summary])
@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 99])
def test_other_format_is_refused_with_both_versions(
    raw: bytes, forger: Any, version: int, read: Callable[[bytes], Any]
) -> None:
    def newer(whole: Any) -> None:
        whole["fields"] = {"format_version": version, "shape": "of things to come"}

    forged = forger.edited(raw, newer)
    with pytest.raises(FormatUnsupported) as caught:
        read(forged)
    assert caught.value.found == version
    assert str(version) in str(caught.value) and str(FORMAT_VERSION) in str(caught.value)


def test_writer_is_held_to_the_same_rules(maker: Any) -> None:
    for changes in (
        {"scaling": (0.25, float("nan"))},
        {"context_id": "../up"},
        {"created_unix_s": -1},
        {"kv_heads": 3},
    ):
        with pytest.raises(ValueError):
            maker.draft(maker.fields(**changes))


def test_case_b26_digests_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """The same context written by processes with other hash seeds is the same, byte for byte."""
    manifests = set()
    for number, seed in enumerate(["0", "1", "random"]):
        root = tmp_path / str(number)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(PROCESS), "write", str(root), "context", "1", "700"]
        subprocess.run(command, env=environment, check=True, timeout=60)
        (path,) = (root / "local").iterdir()
        manifests.add((path / "manifest.json").read_bytes())
    assert len(manifests) == 1
