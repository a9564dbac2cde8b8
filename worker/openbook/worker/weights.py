"""Find and read a model's files, and turn a GGUF file into a directory of safetensors once.

Owns where files come from: a directory, the Hugging Face cache, or a `.gguf` file whose dequantised
weights are kept in a cache of our own. Knows nothing of what makes a model servable. Weights are
only ever read from safetensors or GGUF: no pickle, no remote code.

    <cache>/openbook/models/<sha256 of the file>-<transformers>-<dtype>/
        config.json generation_config.json tokenizer.json … model.safetensors
        digests.json      SHA-256 of each of the others, checked at every load
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from openbook.indexstore.store import begin, sweep
from openbook.worker.errors import ModelMissing, UnsupportedModel
from openbook.worker.fingerprint import digest_file, digest_files

DIGESTS = "digests.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
# GGUF names for the pre-tokenizer that splits every digit off first; transformers reads these files
# with GPT-2's split alone, which differs wherever several spaces come before a digit.
_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})

CheckConfig = Callable[[PretrainedConfig, str], None]
CheckRaw = Callable[[dict[str, Any], str], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A directory that transformers can load, and the digest of the weights as they came."""

    name: str
    directory: Path
    weights_digest: str


def locate(
    source: str | Path,
    *,
    dtype: torch.dtype,
    check: CheckConfig,
    cache: Path | None = None,
) -> ModelFiles:
    """Return the files of a Hugging Face id, a directory or a `.gguf` file.

    `check(config, name)` may refuse a GGUF file before its weights are unpacked. `cache` is where
    those go, by default `$XDG_CACHE_HOME/openbook/models`. HF_HUB_OFFLINE is honoured. Raises
    ModelMissing, and UnsupportedModel for an adapter or an unreadable GGUF file.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelMissing(str(source), "no such file")
        return _unpacked(path, dtype=dtype, check=check, cache=cache or _cache_root())
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if not _HUB_ID.fullmatch(str(source)):
        raise ModelMissing(str(source), "neither a directory, a .gguf file nor a Hugging Face id")
    try:
        snapshot = snapshot_download(
            str(source), allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:
        reason = f"not in the local cache and not fetched ({type(error).__name__})"
        raise ModelMissing(str(source), reason) from error
    return _directory(Path(snapshot), str(source))


def read_config(files: ModelFiles, check_raw: CheckRaw) -> PretrainedConfig:
    """Read a directory's configuration; `check_raw(fields, name)` sees its numbers first.

    Raises what `check_raw` raises, and UnsupportedModel when transformers refuses it.
    """
    try:
        fields, _ = PretrainedConfig.get_config_dict(files.directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(files.name, "its config.json cannot be read as JSON") from error
    check_raw(fields, files.name)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            files.directory, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedModel(files.name, f"its configuration is refused: {error}") from error
    return config


def read_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """Read a directory's tokenizer. Raises ModelMissing when there is none that can be read."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.directory, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelMissing(files.name, f"no usable tokenizer in it: {error}") from error
    return tokenizer


def read_module(
    files: ModelFiles, config: PretrainedConfig, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Read a directory's weights into a model.

    transformers would fill a missing weight with random numbers, or leave one out, and only warn.
    Raises ModelMissing when any is absent, UnsupportedModel when any is left over.
    """
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.directory,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelMissing(files.name, f"its weights cannot be read: {error}") from error
    module: PreTrainedModel = loaded[0]
    lacking = sorted(map(str, [*loaded[1]["missing_keys"], *loaded[1]["mismatched_keys"]]))
    if lacking:
        raise ModelMissing(files.name, f"{len(lacking)} weights are missing, first {lacking[0]}")
    unused = sorted(map(str, loaded[1]["unexpected_keys"]))
    if unused:
        reason = f"its configuration leaves out {len(unused)} of its weights, first {unused[0]}"
        raise UnsupportedModel(files.name, reason)
    return module


def _directory(directory: Path, name: str) -> ModelFiles:
    if (directory / "adapter_config.json").exists():
        # transformers would fetch and load whatever base model the adapter names.
        raise UnsupportedModel(name, "it is an adapter; merge it into its base model first")
    if not (directory / "config.json").is_file():
        raise ModelMissing(name, "no config.json in it")
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ModelMissing(name, "no .safetensors file in it, and pickled weights are never read")
    return ModelFiles(name, directory, digest_files(weights))


def _cache_root() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "openbook" / "models"


def _unpacked(file: Path, *, dtype: torch.dtype, check: CheckConfig, cache: Path) -> ModelFiles:
    """Return the cached safetensors of a GGUF file, unpacking it first if need be."""
    digest = digest_file(file)
    precision = str(dtype).removeprefix("torch.")
    final = cache / f"{digest}-{transformers.__version__}-{precision}"
    if not _is_intact(final):
        sweep(cache)
        with begin(cache) as draft:
            whole = draft.path / final.name
            whole.mkdir(mode=0o700)
            with quiet():
                _unpack(file, whole, dtype=dtype, check=check)
            _seal(whole)
            _replace(whole, final)
    return ModelFiles(file.stem, final, digest)


def _unpack(file: Path, draft: Path, *, dtype: torch.dtype, check: CheckConfig) -> None:
    """Write a GGUF file's model and tokenizer into `draft` as transformers saves them."""
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(file.parent, **where)
        check(config, file.stem)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        module = AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=config,
            dtype=dtype,
            # With the `kernels` package present transformers would otherwise keep the weights
            # packed and take its attention from the network.
            attn_implementation="eager",
            trust_remote_code=False,
            **_dequantize(),
            **where,
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModel(file.stem, f"transformers cannot read it: {error}") from error
    _split_digits(file, tokenizer)
    module.save_pretrained(draft)
    tokenizer.save_pretrained(draft)


def _dequantize() -> dict[str, object]:
    """Ask for dense weights, in the versions of transformers that could keep them packed."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _split_digits(file: Path, tokenizer: Any) -> None:
    """Give a GGUF tokenizer the digit split that its file names and transformers leaves out."""
    import gguf  # only for this: a worker that serves directories does not need it
    from tokenizers import pre_tokenizers

    field = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGIT_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _seal(draft: Path) -> None:
    """Record every file's digest and bring all of it to the disk."""
    files = sorted(entry for entry in draft.iterdir() if entry.is_file())
    digests = {entry.name: digest_file(entry) for entry in files}
    (draft / DIGESTS).write_text(json.dumps(digests, indent=1))
    for entry in [*files, draft / DIGESTS, draft]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_intact(directory: Path) -> bool:
    """Say whether a sealed directory holds exactly the bytes that were written."""
    try:
        digests = json.loads((directory / DIGESTS).read_text())
        return all(digest_file(directory / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _replace(draft: Path, final: Path) -> None:
    """Move `draft` to `final`. An intact one that another process put there first is kept."""
    for _ in range(2):
        try:
            draft.rename(final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _is_intact(final):
            return
        shutil.rmtree(final, ignore_errors=True)
    raise ModelMissing(final.name, "its cache directory keeps changing under us")


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' progress bars: a service's standard error is for its log."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
