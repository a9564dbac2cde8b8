"""Name a model by what decides the numbers that an ingest stores.

Owns the model fingerprint and the digests it is made of. Knows nothing of contexts or of the index,
which has a fingerprint of its own. Digests are SHA-256, in hex; never Python's `hash()`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

PREFILL_KIND = "exact-causal"  # every token attends to all before it
# What a configuration says about files and library versions, and nothing about numbers.
_CONFIG_NOISE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True, slots=True)
class FingerprintFields:
    """Everything that decides what is stored; a change to any one field is another fingerprint.

    `prompt_layout` and `kv_dtype` are empty in the fingerprint of a model by itself.
    """

    weights: str  # digest of the files
    config: str  # digest of the configuration
    tokenizer: str  # digest of vocabulary, merges, special tokens and chat template
    rope: str  # canonical JSON: type, theta, factors, scale, positions
    compute_dtype: str
    prompt_layout: str = ""
    kv_dtype: str = ""
    prefill_kind: str = PREFILL_KIND

    def digest(self) -> str:
        """Return the fingerprint: SHA-256 of all fields by name, 64 hex digits."""
        return _sha256(canonical_json(asdict(self)).encode())

    def parts(self) -> dict[str, str]:
        """Return every field by name, short enough for a manifest: `rope` by its digest."""
        return asdict(self) | {"rope": _sha256(self.rope.encode())}

    def stored_as(self, *, prompt_layout: str, kv_dtype: str) -> "FingerprintFields":
        """Return these fields for contexts of one prompt layout and stored number format."""
        return replace(self, prompt_layout=prompt_layout, kv_dtype=kv_dtype)


def canonical_json(fields: Mapping[str, object]) -> str:
    """Write a mapping in one way only: sorted keys, no spaces, ASCII; unknown types by `str`."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)


def digest_files(files: Iterable[Path]) -> str:
    """Digest files by content and name; the order given does not matter.

    Always reads them: size and time say nothing reliable about what a file holds.
    """
    digests = {file.name: digest_file(file) for file in files}
    return _sha256(canonical_json(digests).encode())


def digest_file(file: Path) -> str:
    """Return the SHA-256 of one file's bytes, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_config(config: Mapping[str, object]) -> str:
    """Digest a configuration without what only names files and library versions."""
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return _sha256(canonical_json(kept).encode())


def digest_tokenizer(serialised: str, *, chat_template: object, special_tokens: object) -> str:
    """Digest a tokenizer: its tokenizer.json text, its template and its special tokens' roles."""
    fields = {"tokenizer": serialised, "template": chat_template, "special": special_tokens}
    return _sha256(canonical_json(fields).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
