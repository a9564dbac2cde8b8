"""The manifest's file: canonical JSON with its own digest.

Owns the encoding of a manifest and every check of what is read back. It knows nothing of
directories and files.

The file is one line of canonical JSON (sorted keys, no spaces, ASCII, no NaN):

    {"fields":{…},"files":[…],"sha256":"…"}

The digest is over all bytes before `,"sha256"`. That makes it a checksum and not a signature:
anyone who can write the file can compute it. So each value is checked as if a stranger had
written it, and a manifest that would not be written byte for byte like this again is refused.
`fields` comes first so that a listing need not parse the files' thousands of digests.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any, cast, get_args

from openbook.indexstore.errors import FormatUnsupported, ShardCorrupt
from openbook.indexstore.head import LIFT_MAX, REACH_MAX, HeadPlan, PlanKind
from openbook.indexstore.jsonfields import (
    a_list,
    a_real,
    a_string,
    an_int,
    an_object,
    exactly,
    no_constant,
    no_duplicates,
    one_of,
)
from openbook.indexstore.layout import (
    DIMENSIONS_MAX,
    DTYPES,
    FORMAT_OLDEST,
    FORMAT_VERSION,
    KIND_OF_LABEL,
    KV_DTYPES,
    RECORD_MAX,
    RecordInfo,
)
from openbook.indexstore.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    RecordEntry,
    StageSeconds,
    Summary,
    check_fields,
    check_files,
)

MANIFEST_BYTES_MAX = 64 << 20  # 120 layers x 8 KV heads x 1M tokens take 49 MiB
LAYERS_MAX = 9999
HEADS_MAX = 4096
DIM_MAX = 65536
TOKENS_MAX = 2**31 - 1
PARTS_MAX = 32
UNIX_S_MAX = 253_402_300_799  # the last second of the year 9999, where calendars end
COUNT_MAX = 2**53  # what a JSON number carries exactly everywhere

_PREFIX = '{"fields":'
_SUFFIX = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')
_SUFFIX_BYTES = len(b',"sha256":""}\n') + 64
_HEX = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FINGERPRINT = re.compile(r"[!-~]{1,256}")
_FILE = re.compile(r"[a-z0-9.-]{1,32}")  # which name exactly: check_files
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,1024}")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's file, after reading it back as a reader would.

    Raises ValueError naming the field that is out of range or the record that does not fit.
    """
    body = _body(manifest)
    if _parse(_loads(body)) != manifest:
        raise ValueError("the manifest does not read back as written")
    digest = hashlib.sha256(body).hexdigest()
    return body + f',"sha256":"{digest}"}}\n'.encode()


def decode(raw: bytes) -> Manifest:
    """Read a manifest's file: the digest first, then every field.

    Raises ShardCorrupt saying what is wrong, FormatUnsupported for a version not read here.
    """
    try:
        body = _sealed_body(raw)
        manifest = _parse(_loads(body))
        if _body(manifest) != body:
            raise ValueError("not in canonical form")
    except (ValueError, RecursionError) as error:
        raise ShardCorrupt(MANIFEST_NAME, str(error)[:500]) from error
    return manifest


def decode_summary(raw: bytes) -> Summary:
    """Read a manifest's fields alone, tens of times faster: the files are not looked at.

    Raises ShardCorrupt or FormatUnsupported like decode.
    """
    try:
        text = _sealed_body(raw).decode("ascii")
        fields, _ = _DECODER.raw_decode(text, len(_PREFIX))
        return _parse_fields(fields)
    except (ValueError, RecursionError) as error:
        raise ShardCorrupt(MANIFEST_NAME, str(error)[:500]) from error


_DECODER = json.JSONDecoder(object_pairs_hook=no_duplicates, parse_constant=no_constant)


def _loads(body: bytes) -> Any:
    return _DECODER.decode(body.decode("ascii") + "}")


def _sealed_body(raw: bytes) -> bytes:
    """Return what the digest at the end covers, once it matches."""
    end = _SUFFIX.fullmatch(raw, max(0, len(raw) - _SUFFIX_BYTES))
    if not raw.startswith(_PREFIX.encode()) or end is None:
        raise ValueError("not a manifest")
    body = raw[:-_SUFFIX_BYTES]
    if hashlib.sha256(body).hexdigest().encode() != end[1]:
        raise ValueError("its own digest does not match")
    return body


def _body(manifest: Manifest) -> bytes:
    """Return the canonical JSON of the fields and files, up to the digest."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(Summary)}
    fields["scaling"] = [float(factor) for factor in manifest.scaling]
    fields["plan"] = [[_plan_of(head) for head in layer] for layer in manifest.plan]
    fields["model_parts"] = dict(manifest.model_parts)
    fields["stages_s"] = {k: float(v) for k, v in dataclasses.asdict(manifest.stages_s).items()}
    whole = {"fields": fields, "files": [file_fields(file) for file in manifest.files]}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.removesuffix("}").encode()


def _plan_of(head: HeadPlan) -> dict[str, Any]:
    """Return a head's plan as it is written: what it does not have has no field."""
    plan: dict[str, Any] = {"kind": head.kind, "queue": head.queue}
    if head.kind == "clusters":
        plan["reach"] = float(head.reach)
    return {**plan, "lift": [float(lift) for lift in head.lift]} if head.lift else plan


def file_fields(file: FileEntry) -> dict[str, Any]:
    """Return a file's entry as it is written; parse_file reads it back."""
    return {
        "name": file.name,
        "bytes": file.bytes,
        "chunks": file.chunks,
        "records": [
            {
                "kind": entry.info.kind.label,
                "head": entry.info.head,
                "dtype": entry.info.dtype,
                "shape": entry.info.shape,
                "sha256": entry.sha256,
            }
            for entry in file.records
        ],
    }


def _parse(whole: Any) -> Manifest:
    """Build the manifest from parsed JSON, trusting nothing. Raises ValueError."""
    exactly(an_object(whole, "manifest"), {"fields", "files"}, "manifest")
    summary = _parse_fields(whole["fields"])
    files = a_list(whole, "files", summary.layers + 1)
    values = {f.name: getattr(summary, f.name) for f in dataclasses.fields(Summary)}
    manifest = Manifest(
        **values, files=tuple(parse_file(file, index) for index, file in enumerate(files))
    )
    check_files(manifest)
    return manifest


def _parse_fields(fields: Any) -> Summary:
    """Build the summary from parsed JSON. The version comes first: it decides what else is there.

    Raises ValueError or FormatUnsupported.
    """
    version = an_int(an_object(fields, "fields"), "format_version", 0, COUNT_MAX)
    if not FORMAT_OLDEST <= version <= FORMAT_VERSION:
        raise FormatUnsupported(version, FORMAT_OLDEST, FORMAT_VERSION)
    exactly(fields, {f.name for f in dataclasses.fields(Summary)}, "fields")
    layers = an_int(fields, "layers", 1, LAYERS_MAX)
    summary = Summary(
        context_id=a_string(fields, "context_id", _ID),
        model_fingerprint=a_string(fields, "model_fingerprint", _FINGERPRINT),
        index_fingerprint=a_string(fields, "index_fingerprint", _FINGERPRINT),
        model_name=a_string(fields, "model_name", _NAME),
        prompt_layout=a_string(fields, "prompt_layout", _ID),
        token_count=an_int(fields, "token_count", 1, TOKENS_MAX),
        layers=layers,
        query_heads=an_int(fields, "query_heads", 1, HEADS_MAX),
        kv_heads=an_int(fields, "kv_heads", 1, HEADS_MAX),
        head_dim=an_int(fields, "head_dim", 1, DIM_MAX),
        value_dim=an_int(fields, "value_dim", 1, DIM_MAX),
        kv_dtype=one_of(fields, "kv_dtype", KV_DTYPES),
        scaling=tuple(a_real(f, "scaling") for f in a_list(fields, "scaling", layers)),
        plan=tuple(_parse_plan(layer) for layer in a_list(fields, "plan", layers)),
        created_unix_s=an_int(fields, "created_unix_s", 0, UNIX_S_MAX),
        stages_s=_parse_stages(fields["stages_s"]),
        kv_bytes_16bit=an_int(fields, "kv_bytes_16bit", 0, COUNT_MAX),
        model_parts=_parse_parts(fields["model_parts"]),
        format_version=version,
        bytes_total=an_int(fields, "bytes_total", 0, COUNT_MAX),
    )
    check_fields(summary)
    return summary


def _parse_parts(parts: Any) -> tuple[tuple[str, str], ...]:
    """Parse an object of names and short values, as sorted pairs."""
    an_object(parts, "model_parts")
    if len(parts) > PARTS_MAX:
        raise ValueError(f"model_parts of {len(parts)} parts")
    names = sorted(a_string({"part": name}, "part", _ID) for name in parts)
    return tuple((name, a_string(parts, name, _ID)) for name in names)


def _parse_plan(layer: Any) -> tuple[HeadPlan, ...]:
    heads = []
    for head in a_list({"plan": layer}, "plan"):
        kind = one_of(an_object(head, "plan"), "kind", get_args(PlanKind))
        names = {"kind", "queue"} | ({"reach"} if kind == "clusters" else set())
        exactly(head, names | ({"lift"} & head.keys()), "plan")
        lifts = a_list(head, "lift") if "lift" in head else []
        lift = tuple(_within(value, "lift", LIFT_MAX) for value in lifts)
        reach = _within(head["reach"], "reach", REACH_MAX) if "reach" in names else 0.0
        queue = an_int(head, "queue", 0, TOKENS_MAX)
        heads.append(HeadPlan(cast(PlanKind, kind), queue, lift, reach))
    return tuple(heads)


def _within(value: Any, name: str, most: float) -> float:
    number = a_real(value, name)
    if not 0 <= number <= most:
        raise ValueError(f"{name} is not from 0 to {most}")
    return number


def _parse_stages(stages: Any) -> StageSeconds:
    names = [f.name for f in dataclasses.fields(StageSeconds)]
    exactly(an_object(stages, "stages_s"), set(names), "stages_s")
    seconds = {name: a_real(stages[name], name) for name in names}
    if min(seconds.values()) < 0:
        raise ValueError("stages_s holds a negative time")
    return StageSeconds(**seconds)


def parse_file(file: Any, index: int) -> FileEntry:
    """Parse the entry of file `index`: the tokens first, then the layers in order.

    Raises ValueError.
    """
    exactly(an_object(file, "files"), {f.name for f in dataclasses.fields(FileEntry)}, "files")
    chunks = a_list(file, "chunks")
    layer = None if index == 0 else index - 1
    return FileEntry(
        name=a_string(file, "name", _FILE),
        bytes=an_int(file, "bytes", 1, COUNT_MAX),
        chunks=tuple(a_string({"chunk": chunk}, "chunk", _HEX) for chunk in chunks),
        records=tuple(_parse_record(record, layer) for record in a_list(file, "records")),
    )


def _parse_record(record: Any, layer: int | None) -> RecordEntry:
    exactly(an_object(record, "records"), {"kind", "head", "dtype", "shape", "sha256"}, "records")
    shape = a_list(record, "shape")
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"shape of {len(shape)} dimensions")
    info = RecordInfo(
        kind=KIND_OF_LABEL[one_of(record, "kind", tuple(KIND_OF_LABEL))],
        layer=layer,
        head=None if record["head"] is None else an_int(record, "head", 0, HEADS_MAX - 1),
        dtype=one_of(record, "dtype", tuple(DTYPES)),
        shape=tuple(an_int({"shape": size}, "shape", 0, TOKENS_MAX) for size in shape),
    )
    if info.record_bytes > RECORD_MAX:
        raise ValueError(f"record of {info.record_bytes} bytes")
    return RecordEntry(info, a_string(record, "sha256", _HEX))
