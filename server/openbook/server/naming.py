"""The resource names of contexts, and the ids that documents get under the served model.

Owns both directions of a name. It knows nothing of what a context holds.
"""

from __future__ import annotations

from collections.abc import Callable

from openbook.server.catalog import Entry
from openbook.server.errors import NameInvalid
from openbook.server.identity import context_id_of, is_context_id

NAME_PREFIX = "contexts/"


def name_of(context_id: str) -> str:
    """Return the resource name of `context_id`."""
    return NAME_PREFIX + context_id


def parse_name(name: str) -> str:
    """Return the context id in a resource name. Raises NameInvalid, which does not repeat it."""
    if not name.startswith(NAME_PREFIX) or not is_context_id(name[len(NAME_PREFIX) :]):
        raise NameInvalid()
    return name[len(NAME_PREFIX) :]


class ContextNaming:
    """The ids and fingerprints of contexts of the served model."""

    def __init__(
        self, secret: bytes, fingerprint_for: Callable[[str, str], str], *, kv_dtype: str
    ) -> None:
        self._secret = secret
        self._fingerprint_for = fingerprint_for
        self._kv_dtype = kv_dtype

    def id_of(self, layout: str, document_sha256: bytes) -> str:
        """Return the id of a document in a prompt layout."""
        return context_id_of(
            self._secret,
            model_fingerprint=self._fingerprint_for(layout, self._kv_dtype),
            layout=layout,
            document_sha256=document_sha256,
        )

    def is_ours(self, entry: Entry) -> bool:
        """Tell whether a published context can be read by the served model.

        Its stored numbers may be of another type than the setting: one that did not fit it.
        """
        kinds = ("float16", "bfloat16", "float32")
        return entry.fingerprint in {self._fingerprint_for(entry.layout, kind) for kind in kinds}
