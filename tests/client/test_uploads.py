"""Documents on their way out: what is refused, where, and how the rest is cut."""

import hashlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.client.uploads import CHUNK_BYTES, opened

TEXT = "The keeper's daughter keeps the light. Ünïcode, 読, 🗝.\n"


def sent(document: object) -> tuple[bytes, list[int]]:
    """Return the bytes and the chunk sizes that `document` is sent as; check its digest."""
    with opened(document) as upload:  # type: ignore[arg-type]
        chunks = list(upload.chunks())
    joined = b"".join(chunks)
    assert upload.failure is None
    assert upload.sha256 == hashlib.sha256(joined).digest()
    assert upload.bytes_total == len(joined)
    return joined, [len(chunk) for chunk in chunks]


def test_text_bytes_path_and_file_are_the_same_document(tmp_path: Path) -> None:
    path = tmp_path / "light.txt"
    path.write_text(TEXT, encoding="utf-8")
    with path.open("rb") as file:
        from_file = sent(file)
        assert not file.closed
    assert sent(TEXT) == sent(TEXT.encode()) == sent(path) == from_file
    assert from_file[0] == TEXT.encode()


def test_file_is_sent_from_where_it_stands() -> None:
    file = io.BytesIO(b"header: none\n" + TEXT.encode())
    file.readline()
    assert sent(file)[0] == TEXT.encode()


def test_pipe_is_sent_whole() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    assert sent(Pipe(TEXT.encode()))[0] == TEXT.encode()


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_chunks_are_at_most_one_mebibyte(size: int) -> None:
    joined, sizes = sent(b"a" * size)
    assert len(joined) == size
    assert all(0 < chunk <= CHUNK_BYTES for chunk in sizes)


def test_case_b56_invalid_byte_is_refused_with_its_offset() -> None:
    with pytest.raises(ValueError, match="byte offset 3$"):
        sent(b"caf\xe9")
    with pytest.raises(ValueError, match="byte offset 3$"):
        sent(b"caf\xe9 au lait")


def test_case_b56_lone_surrogate_is_refused_with_its_offset() -> None:
    with pytest.raises(ValueError, match="character offset 4$"):
        sent("key \ud83d")


def test_case_b56_nul_bytes_are_kept() -> None:
    assert sent("\0\0\0")[0] == b"\0\0\0"


def test_text_after_a_blank_chunk_is_a_document() -> None:
    whole = b" " * (CHUNK_BYTES - 1) + "読".encode()
    assert sent(whole)[0] == whole


@given(st.integers(0, 6), st.sampled_from(["é", "読", "🗝"]), st.integers(0, 3))
def test_offset_is_right_around_the_chunk_boundary(shift: int, letter: str, cut: int) -> None:
    """A character cut by the boundary is carried over; an invalid one is found where it starts."""
    before = b"a" * (CHUNK_BYTES - shift)
    whole = before + letter.encode() + b" end"
    assert sent(whole)[0] == whole
    encoded = letter.encode()
    broken = before + encoded[: max(1, len(encoded) - 1 - cut % 2)] + b" end"
    with pytest.raises(UnicodeDecodeError) as truth:
        broken.decode()
    with pytest.raises(ValueError, match=f"byte offset {truth.value.start}$"):
        sent(broken)


def test_errors_hold_no_text_of_the_document() -> None:
    with pytest.raises(ValueError) as caught:
        sent("a canary sings \ud83d")
    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("document", [io.StringIO("text"), 7, None, ["text"]])
def test_what_is_no_document_is_a_type_error(document: object) -> None:
    with pytest.raises(TypeError, match="a document is"):
        sent(document)


def test_file_that_fails_midway_ends_the_chunks_and_is_kept() -> None:
    class Broken(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.reads += 1
            if self.reads == 5:  # two chunks and an end to check, one chunk sent
                raise OSError(5, "Input/output error")
            return super().read(size)

    with opened(Broken(b"a" * (CHUNK_BYTES + 9))) as upload:
        assert [len(chunk) for chunk in upload.chunks()] == [CHUNK_BYTES]
        assert isinstance(upload.failure, OSError)


def test_name_is_the_file_name_as_text(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.txt"  # a file name that is not UTF-8
    path.write_text(TEXT, encoding="utf-8")
    with opened(path) as upload:
        assert upload.name == "caf?.txt"
