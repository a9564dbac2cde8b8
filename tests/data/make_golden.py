"""Write a golden context: what this version of the format looks like, for every later one to read.

    python tests/data/make_golden.py DIRECTORY

Makes DIRECTORY/golden-v<N>.tar.gz, which holds the directory of a context, and the digests of its
arrays, DIRECTORY/golden-v<N>.json. Run once per format version; the files are then committed and
never made again. The numbers are arbitrary, but a middle of a few keys is really indexed, so that
verification has probes to answer.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "indexstore"))

from indexed import IndexedMaker

from openbook.indexstore.layer import layer_arrays
from openbook.indexstore.layout import FORMAT_VERSION
from openbook.indexstore.store import StoredContext, open_context

TOKENS = 647  # seven keys in the middle


def named_arrays(context: StoredContext) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield every array of a context with a name of its own."""
    yield "tokens", context.token_ids
    yield "offsets", context.offsets
    for layer in range(context.manifest.layers):
        for kind, head, array in layer_arrays(context.layer(layer)):
            yield f"{layer}/{kind.label}" + ("" if head is None else f"/{head}"), array


def digests(context: StoredContext) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of each array, in words that any reader can compare."""
    return {
        name: f"{array.dtype.str} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for name, array in named_arrays(context)
    }


def make(directory: Path) -> None:
    """Write the golden context of the format version that this code writes."""
    name = f"golden-v{FORMAT_VERSION}"
    with tempfile.TemporaryDirectory() as root:
        maker = IndexedMaker(Path(root))
        maker.train = 20
        path = maker.context(TOKENS, query_heads=2, kv_heads=1, head_dim=8, value_dim=8)
        with open_context(path, model_fingerprint=None) as context:
            text = json.dumps(digests(context), indent=1)
        with tarfile.open(directory / f"{name}.tar.gz", "x:gz") as archive:
            archive.add(path, name)
    (directory / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [directory]:
            make(Path(directory))
        case _:
            sys.exit(__doc__)
