"""The sealed description of a context, as it is in memory.

Owns the fields of a manifest and the rules by which they fit each other. It knows nothing of
JSON (canonical.py), of LMDB or of directories.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from openbook.indexstore.head import WINDOW_TOKENS, HeadPlan
from openbook.indexstore.layout import (
    CODE_KINDS,
    FORMAT_VERSION,
    GRAPH_KINDS,
    HEAD_KINDS,
    LAYER_KINDS,
    TOKEN_KINDS,
    Kind,
    RecordInfo,
    check_shapes,
    code_sizes,
)

MANIFEST_NAME = "manifest.json"
TOKENS_NAME = "tokens.mdb"
CHUNK_BYTES = 1 << 20  # one digest per MiB of a file


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

    def kinds(self, head: int) -> tuple[Kind, ...]:
        """Return the kinds of the records of a head, in the order in which heads have them."""
        found = {entry.info.kind for entry in self.records if entry.info.head == head}
        return tuple(kind for kind in HEAD_KINDS if kind in found)


@dataclass(frozen=True, slots=True)
class ManifestFields:
    """What the writer of a context knows about it; the seal adds the files.

    `scaling` is the factor of q·k per layer. `plan` holds per layer one HeadPlan per KV head, and
    none for a context without a middle. `kv_bytes_16bit` is the size of the same tokens' keys and
    values alone at two bytes a number. `model_parts` are names and values (digests, or short
    words) of what the model fingerprint is made of, sorted: they tell which part of another model
    differs, and decide nothing.
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
    model_parts: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    @property
    def middle_tokens(self) -> int:
        """The number of tokens outside the window."""
        return max(0, self.token_count - WINDOW_TOKENS)


# Inheritance, though these are no exceptions: readers say manifest.token_count.
@dataclass(frozen=True, slots=True)
class Summary(ManifestFields):
    """What a listing needs of a sealed context: all but the files.

    `bytes_total` is the size of the shard files.
    """

    format_version: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class Manifest(Summary):
    """A sealed context's whole description. `files`: the tokens' first, then one per layer."""

    files: tuple[FileEntry, ...]


def layer_name(layer: int) -> str:
    """Return the file name of a layer's shard."""
    return f"layer-{layer:03d}.mdb"


def complete(fields: ManifestFields, files: tuple[FileEntry, ...]) -> Manifest:
    """Join the writer's fields and the files it wrote."""
    values = {f.name: getattr(fields, f.name) for f in dataclasses.fields(ManifestFields)}
    bytes_total = sum(file.bytes for file in files)
    return Manifest(**values, format_version=FORMAT_VERSION, bytes_total=bytes_total, files=files)


def check_fields(summary: Summary) -> None:
    """Check the fields against each other. Raises ValueError with both numbers."""
    if not all(factor > 0 for factor in summary.scaling):
        raise ValueError("scaling holds a number that is not positive")
    if summary.query_heads % summary.kv_heads:
        raise ValueError(f"{summary.query_heads} query heads for {summary.kv_heads} KV heads")
    group = summary.query_heads // summary.kv_heads
    heads = summary.kv_heads if summary.middle_tokens else 0
    for layer, plan in enumerate(summary.plan):
        if len(plan) != heads:
            raise ValueError(f"plan of layer {layer} has {len(plan)} heads, expected {heads}")
        if any(len(head.lift) not in (0, group) for head in plan):
            raise ValueError(f"plan of layer {layer} has a lift of other than {group} query heads")
    for name in ("plan", "scaling"):
        count = len(getattr(summary, name))
        if count != summary.layers:
            raise ValueError(f"{name} of {count} layers, expected {summary.layers}")


def check_files(manifest: Manifest) -> None:
    """Check that the files are those of the fields: names, records, shapes, sizes.

    Raises ValueError naming the file.
    """
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
    names = [TOKENS_NAME, *(layer_name(layer) for layer in range(manifest.layers))]
    if [file.name for file in manifest.files] != names:
        raise ValueError("the files are not the tokens and each layer, in order")
    if manifest.bytes_total != sum(file.bytes for file in manifest.files):
        raise ValueError("bytes_total is not the sum of the files")
    heads = range(manifest.kv_heads if manifest.middle_tokens else 0)
    of_tokens: list[tuple[Kind, int | None]] = [(kind, None) for kind in TOKEN_KINDS]
    of_layer: list[tuple[Kind, int | None]] = [(kind, None) for kind in LAYER_KINDS]
    known |= code_sizes(manifest.middle_tokens, manifest.head_dim)
    for index, file in enumerate(manifest.files):
        infos = [entry.info for entry in file.records]
        expected = of_tokens
        if index:
            kinds = [file.kinds(head) for head in heads]
            plan = manifest.plan[index - 1]
            if not all(
                _is_complete(k, p, manifest.format_version)
                for k, p in zip(kinds, plan, strict=True)
            ):
                raise ValueError(f"{file.name} does not hold the records of its format and plan")
            expected = of_layer + [(kind, head) for head in heads for kind in kinds[head]]
        if [(info.kind, info.head) for info in infos] != expected:
            raise ValueError(f"{file.name} does not list the records it must hold, in order")
        check_shapes(infos, known, kv_dtype=manifest.kv_dtype)
        if len(file.chunks) != -(-file.bytes // CHUNK_BYTES):
            raise ValueError(f"{file.name} of {file.bytes} bytes lists {len(file.chunks)} chunks")


def _is_complete(kinds: tuple[Kind, ...], plan: HeadPlan, version: int) -> bool:
    """Say whether a head has the records that its format demands and its plan reads."""
    graph, codes = set(GRAPH_KINDS), set(CODE_KINDS)
    found, always = set(kinds), set(HEAD_KINDS) - graph - codes
    if version == 1:
        return found == always | graph and plan.kind != "clusters"
    if plan.kind != "clusters" and not graph <= found:
        return False
    return found in (always | codes, always | codes | graph)
