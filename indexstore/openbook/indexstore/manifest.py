"""The sealed description of a context.

Owns the manifest's fields, their canonical JSON and every check of what is read from it. It
knows nothing of LMDB or of directories.

The file is one line: {"manifest":{…},"sha256":"…"}. The inner object is canonical JSON (sorted
keys, no spaces, ASCII, no NaN); the digest is over its bytes. That makes it a checksum and not a
signature: anyone who can write the file can compute it. So each value is checked as if a
stranger had written it, and a manifest that would not be written byte for byte like this again is
refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openbook.indexstore.errors import FormatUnsupported, ShardCorrupt
from openbook.indexstore.head import WINDOW_TOKENS, HeadPlan
from openbook.indexstore.layout import (
    DIMENSIONS_MAX,
    DTYPES,
    FORMAT_OLDEST,
    FORMAT_VERSION,
    HEAD_KINDS,
    KIND_OF_LABEL,
    KV_DTYPES,
    LAYER_KINDS,
    RECORD_MAX,
    TOKEN_KINDS,
    Kind,
    RecordInfo,
    check_shapes,
)

MANIFEST_NAME = "manifest.json"
TOKENS_NAME = "tokens.mdb"
MANIFEST_BYTES_MAX = 64 << 20  # 70 times the manifest of 80 layers x 8 heads x 128K tokens
CHUNK_BYTES = 1 << 20  # one digest per MiB of a file
LAYERS_MAX = 9999
HEADS_MAX = 4096
DIM_MAX = 65536
TOKENS_MAX = 2**31 - 1
COUNT_MAX = 2**53  # what a JSON number carries exactly everywhere

_PREFIX = b'{"manifest":'
_SUFFIX = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')
_SUFFIX_BYTES = len(b',"sha256":""}\n') + 64
_HEX = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FINGERPRINT = re.compile(r"[!-~]{1,256}")
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,1024}")


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """How long each stage of the ingest took, in seconds."""

    tokenize: float
    prefill: float
    build: float
    write: float


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One record of a file: its header and the SHA-256 of its whole value.

    The header is part of the value, so the digest is bound to kind, layer and head.
    """

    info: RecordInfo
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the context: its size, a SHA-256 per CHUNK_BYTES of it, and its records."""

    name: str
    bytes: int
    chunks: tuple[str, ...]
    records: tuple[RecordEntry, ...]


@dataclass(frozen=True, slots=True)
class ManifestFields:
    """What the writer of a context knows about it; the seal adds the files.

    `scaling` is the factor of q·k per layer. `plan` holds per layer one HeadPlan per KV head, and
    none for a context without a middle. `kv_bytes_16bit` is the size of the same tokens' keys and
    values alone at two bytes a number.
    """

    context_id: str
    model_fingerprint: str
    index_fingerprint: str
    model_name: str
    prompt_layout: str
    token_count: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    kv_dtype: str
    scaling: tuple[float, ...]
    plan: tuple[tuple[HeadPlan, ...], ...]
    created_unix_s: int
    stages_s: StageSeconds
    kv_bytes_16bit: int

    @property
    def middle_tokens(self) -> int:
        """The number of tokens outside the window."""
        return max(0, self.token_count - WINDOW_TOKENS)


# The one inheritance here that is no exception class: readers say manifest.token_count.
@dataclass(frozen=True, slots=True)
class Manifest(ManifestFields):
    """A sealed context's description: the writer's fields, the format and the files."""

    format_version: int
    files: tuple[FileEntry, ...]

    @property
    def bytes_total(self) -> int:
        """The size of all shard files on disk."""
        return sum(file.bytes for file in self.files)


def layer_name(layer: int) -> str:
    """Return the file name of a layer's shard."""
    return f"layer-{layer:03d}.mdb"


def complete(fields: ManifestFields, files: tuple[FileEntry, ...]) -> Manifest:
    """Join the writer's fields and the files it wrote."""
    values = {f.name: getattr(fields, f.name) for f in dataclasses.fields(ManifestFields)}
    return Manifest(**values, format_version=FORMAT_VERSION, files=files)


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's file, after checking it as a reader would.

    Raises ValueError naming the field that is out of range or the record that does not fit.
    """
    body = _body(manifest)
    if _parse(json.loads(body)) != manifest:
        raise ValueError("the manifest does not read back as written")
    digest = hashlib.sha256(body).hexdigest()
    return _PREFIX + body + f',"sha256":"{digest}"}}\n'.encode()


def decode(raw: bytes) -> Manifest:
    """Read a manifest's file: the digest first, then every field.

    Raises ShardCorrupt saying what is wrong, FormatUnsupported for a version not read here.
    """
    try:
        body = raw[len(_PREFIX) : -_SUFFIX_BYTES]
        end = _SUFFIX.fullmatch(raw, max(0, len(raw) - _SUFFIX_BYTES))
        if not raw.startswith(_PREFIX) or end is None:
            raise ValueError("not a manifest")
        if hashlib.sha256(body).hexdigest().encode() != end[1]:
            raise ValueError("its own digest does not match")
        fields = json.loads(body, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        version = _int(_dict(fields, "manifest"), "format_version", 0, COUNT_MAX)
        if not FORMAT_OLDEST <= version <= FORMAT_VERSION:
            raise FormatUnsupported(version, FORMAT_OLDEST, FORMAT_VERSION)
        manifest = _parse(fields)
        if _body(manifest) != body:
            raise ValueError("not in canonical form")
    except (ValueError, RecursionError) as error:
        raise ShardCorrupt(MANIFEST_NAME, str(error)[:500]) from error
    return manifest


def _body(manifest: Manifest) -> bytes:
    """Return the canonical JSON of the inner object."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(Manifest)}
    fields["scaling"] = [float(factor) for factor in manifest.scaling]
    fields["plan"] = [[dataclasses.asdict(head) for head in layer] for layer in manifest.plan]
    fields["stages_s"] = {k: float(v) for k, v in dataclasses.asdict(manifest.stages_s).items()}
    fields["files"] = [
        {
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
        for file in manifest.files
    ]
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _parse(fields: dict[str, Any]) -> Manifest:
    """Build the manifest from parsed JSON, trusting nothing. Raises ValueError."""
    _exactly(fields, {f.name for f in dataclasses.fields(Manifest)}, "manifest")
    layers = _int(fields, "layers", 1, LAYERS_MAX)
    manifest = Manifest(
        context_id=_str(fields, "context_id", _ID),
        model_fingerprint=_str(fields, "model_fingerprint", _FINGERPRINT),
        index_fingerprint=_str(fields, "index_fingerprint", _FINGERPRINT),
        model_name=_str(fields, "model_name", _NAME),
        prompt_layout=_str(fields, "prompt_layout", _ID),
        token_count=_int(fields, "token_count", 1, TOKENS_MAX),
        layers=layers,
        query_heads=_int(fields, "query_heads", 1, HEADS_MAX),
        kv_heads=_int(fields, "kv_heads", 1, HEADS_MAX),
        head_dim=_int(fields, "head_dim", 1, DIM_MAX),
        value_dim=_int(fields, "value_dim", 1, DIM_MAX),
        kv_dtype=_one_of(fields, "kv_dtype", KV_DTYPES),
        scaling=tuple(_real(f, "scaling") for f in _list(fields, "scaling", layers)),
        plan=tuple(_parse_plan(layer) for layer in _list(fields, "plan", layers)),
        created_unix_s=_int(fields, "created_unix_s", 0, COUNT_MAX),
        stages_s=_parse_stages(fields["stages_s"]),
        kv_bytes_16bit=_int(fields, "kv_bytes_16bit", 0, COUNT_MAX),
        format_version=_int(fields, "format_version", FORMAT_OLDEST, FORMAT_VERSION),
        files=tuple(
            _parse_file(file, index)
            for index, file in enumerate(_list(fields, "files", layers + 1))
        ),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Check the manifest's fields against each other: heads, plan, and all records' shapes."""
    if manifest.query_heads % manifest.kv_heads:
        raise ValueError(f"{manifest.query_heads} query heads for {manifest.kv_heads} KV heads")
    heads = manifest.kv_heads if manifest.middle_tokens else 0
    for layer, plan in enumerate(manifest.plan):
        if len(plan) != heads:
            raise ValueError(f"plan of layer {layer} has {len(plan)} heads, expected {heads}")
    known = {
        "n": manifest.token_count,
        "m": manifest.middle_tokens,
        "w": manifest.token_count - manifest.middle_tokens,
        "d": manifest.head_dim,
        "v": manifest.value_dim,
        "kv": manifest.kv_heads,
        "q": manifest.query_heads,
        "pair": 2,
    }
    tokens: list[tuple[Kind, int | None]] = [(kind, None) for kind in TOKEN_KINDS]
    layer_records: list[tuple[Kind, int | None]] = [(kind, None) for kind in LAYER_KINDS]
    layer_records += [(kind, head) for head in range(heads) for kind in HEAD_KINDS]
    for index, file in enumerate(manifest.files):
        infos = [entry.info for entry in file.records]
        if [(info.kind, info.head) for info in infos] != (layer_records if index else tokens):
            raise ValueError(f"{file.name} does not list the records it must hold, in order")
        check_shapes(infos, known, kv_dtype=manifest.kv_dtype)
        if len(file.chunks) != -(-file.bytes // CHUNK_BYTES):
            raise ValueError(f"{file.name} of {file.bytes} bytes lists {len(file.chunks)} chunks")


def _parse_plan(layer: Any) -> tuple[HeadPlan, ...]:
    heads = []
    for head in _list({"plan": layer}, "plan"):
        _exactly(_dict(head, "plan"), {"kind", "queue"}, "plan")
        queue = _int(head, "queue", 0, TOKENS_MAX)
        kind = _one_of(head, "kind", ("scan", "graph"))
        heads.append(HeadPlan(kind="scan" if kind == "scan" else "graph", queue=queue))
    return tuple(heads)


def _parse_stages(stages: Any) -> StageSeconds:
    names = [f.name for f in dataclasses.fields(StageSeconds)]
    _exactly(_dict(stages, "stages_s"), set(names), "stages_s")
    seconds = {name: _real(stages[name], name) for name in names}
    if min(seconds.values()) < 0:
        raise ValueError("stages_s holds a negative time")
    return StageSeconds(**seconds)


def _parse_file(file: Any, index: int) -> FileEntry:
    """Parse the entry of file `index`: the tokens first, then the layers in order."""
    _exactly(_dict(file, "files"), {f.name for f in dataclasses.fields(FileEntry)}, "files")
    name = TOKENS_NAME if index == 0 else layer_name(index - 1)
    if file["name"] != name:
        raise ValueError(f"file {index} is not named {name}")
    chunks = _list(file, "chunks")
    layer = None if index == 0 else index - 1
    return FileEntry(
        name=name,
        bytes=_int(file, "bytes", 1, COUNT_MAX),
        chunks=tuple(_str({"chunk": chunk}, "chunk", _HEX) for chunk in chunks),
        records=tuple(_parse_record(record, layer) for record in _list(file, "records")),
    )


def _parse_record(record: Any, layer: int | None) -> RecordEntry:
    _exactly(_dict(record, "records"), {"kind", "head", "dtype", "shape", "sha256"}, "records")
    shape = _list(record, "shape")
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"shape of {len(shape)} dimensions")
    info = RecordInfo(
        kind=KIND_OF_LABEL[_one_of(record, "kind", tuple(KIND_OF_LABEL))],
        layer=layer,
        head=None if record["head"] is None else _int(record, "head", 0, HEADS_MAX - 1),
        dtype=_one_of(record, "dtype", tuple(DTYPES)),
        shape=tuple(_int({"shape": size}, "shape", 0, TOKENS_MAX) for size in shape),
    )
    if info.record_bytes > RECORD_MAX:
        raise ValueError(f"record of {info.record_bytes} bytes")
    return RecordEntry(info, _str(record, "sha256", _HEX))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("duplicate keys")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number here")


def _exactly(fields: Mapping[str, Any], names: set[str], where: str) -> None:
    if fields.keys() != names:
        missing, unknown = names - fields.keys(), len(fields.keys() - names)
        raise ValueError(f"{where}: missing {sorted(missing)}, {unknown} unknown keys")


def _dict(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{name} is not an object")
    return value


def _list(fields: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    value = fields.get(name)
    if type(value) is not list or length not in (None, len(value)):
        raise ValueError(f"{name} is not a list" + ("" if length is None else f" of {length}"))
    return value


def _int(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is not a whole number from {low} to {high}")
    return value


def _real(value: Any, name: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{name} holds something that is not a finite number")
    return value


def _str(fields: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = fields.get(name)
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise ValueError(f"{name} is not a string of the form {pattern.pattern}")
    return value


def _one_of(fields: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = fields.get(name)
    if type(value) is not str or value not in choices:
        raise ValueError(f"{name} is not one of {', '.join(choices)}")
    return value
