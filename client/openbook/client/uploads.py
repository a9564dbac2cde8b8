"""A document on its way to the service: checked, hashed, cut into chunks.

Knows: text, files and UTF-8. Does not know: channels or messages. A file is read twice, once to
check and hash and once to send, so that it is never in memory as a whole; a stream that cannot be
rewound is read into memory.
"""

import codecs
import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20  # the service takes at most 1 MiB a chunk, so any document passes 4 MiB

Document = str | bytes | Path | BinaryIO


@dataclass(slots=True)
class Upload:
    """A checked document: from byte `start` to its end, `file` holds UTF-8.

    `failure` is what ended `chunks` before the document's end.
    """

    file: BinaryIO
    start: int
    sha256: bytes
    bytes_total: int
    name: str
    failure: OSError | ValueError | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def chunks(self) -> Iterator[bytes]:
        """Yield the document from its start in chunks of at most CHUNK_BYTES.

        May be called again to send it again: each caller keeps its own place, as the thread that
        sent before may still be at its last chunk.

        gRPC runs this in a thread of its own and would only log what it raises, so a failed read
        (or a file that was closed because the call is over) ends the chunks and is kept: the
        service refuses what does not have the announced digest.
        """
        place = self.start
        try:
            while chunk := self._read(place):
                place += len(chunk)
                yield chunk
        except (OSError, ValueError) as error:
            self.failure = error

    def _read(self, place: int) -> bytes:
        """Return the chunk at `place`."""
        with self._reading:
            self.file.seek(place)
            return self.file.read(CHUNK_BYTES)


@contextmanager
def opened(document: Document) -> Iterator[Upload]:
    """Check and hash `document`; on leaving, close it if it was opened here.

    A str is text and a Path or an open binary file is a file, from where it stands. Raises
    ValueError with the offset at the first character (str) or byte (others) that is not UTF-8, and
    for a document without any text, TypeError for a file opened as text, OSError as `open` does.
    """
    with _binary(document) as file:
        start = file.tell()
        digest, size = _checked(file)
        yield Upload(file, start, digest, size, _name(document))


def utf8(text: str, what: str) -> bytes:
    """Return `text` as UTF-8; `what` names it in the error.

    Raises TypeError when it is no str, ValueError with the offset of a character that is not one.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds a lone surrogate at character offset {error.start}"
        ) from None  # the cause would carry the text itself


def _binary(document: Document) -> AbstractContextManager[BinaryIO]:
    """Return `document` as a binary file that can be rewound."""
    if isinstance(document, str):
        return io.BytesIO(utf8(document, "the document"))
    if isinstance(document, bytes):
        return io.BytesIO(document)
    if isinstance(document, Path):
        return document.open("rb")
    if isinstance(document, io.TextIOBase) or not hasattr(document, "read"):
        kind = type(document).__name__
        raise TypeError(f"a document is a str, bytes, Path or a file opened 'rb', not {kind}")
    if document.seekable():
        return nullcontext(document)  # the caller's own: left open
    return io.BytesIO(document.read())


def _checked(file: BinaryIO) -> tuple[bytes, int]:
    """Return SHA-256 and size of the rest of `file`.

    Raises ValueError where it is not UTF-8, or when it is empty or whitespace from end to end.
    """
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    is_blank = True
    while True:
        chunk = file.read(CHUNK_BYTES)
        carried = len(decoder.getstate()[0])  # bytes of a character cut by the chunk's start
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            offset = size - carried + error.start
            raise ValueError(f"the document is not UTF-8 at byte offset {offset}") from None
        is_blank = is_blank and not text.strip()
        if not chunk:
            if is_blank:
                raise ValueError("the document is empty, or whitespace alone")
            return digest.digest(), size
        digest.update(chunk)
        size += len(chunk)


def _name(document: Document) -> str:
    """Return the name of the file that `document` is, or "" for text and nameless streams."""
    if isinstance(document, Path):
        return document.name.encode(errors="replace").decode()
    return ""
