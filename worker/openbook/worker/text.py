"""Turn an answer's token ids into text that is safe to send, piece by piece.

Owns what is held back: bytes that are not yet a character, and text that may yet become a stop
string. Knows nothing of the model; which ids end an answer is the caller's to know.
"""

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"  # how a decoder writes bytes that are no character, or not yet
_PATIENCE = 16  # ids held for one character; four are enough unless tokens straddle characters


class TextStream:
    """The text of one answer, grown by one id at a time.

    All pieces joined are the decoding of all ids, cut before the stop string that was completed
    first. Special tokens are not shown. A piece costs time by its own length, not by the answer's.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = ()) -> None:
        """Decode with `tokenizer`, a vocabulary's `marked`, and end at any of `stop`."""
        self._characters = _CharacterStream(tokenizer)
        self._stop = StopFinder(stop)

    @property
    def is_stopped(self) -> bool:
        """Say whether a stop string was found; nothing comes after it."""
        return self._stop.is_found

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that can be sent now; often empty."""
        if self.is_stopped:
            return ""
        return self._stop.push(self._characters.push(token_id))

    def finish(self) -> str:
        """Return what was held back, at the end of the answer; a cut character becomes U+FFFD."""
        if self.is_stopped:
            return ""
        return self._stop.push(self._characters.finish()) + self._stop.finish()


class StopFinder:
    """Passes text through up to the first stop string, holding back what may begin one.

    "First" is the one completed first and, of those, the one that began first: so the cut is the
    same however the text is split into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not text for text in stop):
            raise ValueError(
                "an empty stop string would end every answer before its first character"
            )
        self._stop = tuple(stop)
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """Return the text that no stop string can claim any more."""
        if self.is_found:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stop if stop in text]
        if found:
            end, negative_length = min(found)
            self.is_found, self._held = True, ""
            return text[: end + negative_length]
        held = self._overlap(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text held back: no stop string will be completed."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


class _CharacterStream:
    """Decodes ids into whole characters.

    A decoder may treat the first id of a text unlike the rest (some drop its space), so open ids
    are decoded behind those of the last piece, and what the latter give alone is taken off again.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._hidden = frozenset(each for each, token in added.items() if token.special)
        self._sent: list[int] = []  # ids of the last piece
        self._open: list[int] = []  # ids after it, their text not returned yet

    def push(self, token_id: int) -> str:
        """Take one id; return the characters that it completed."""
        if token_id in self._hidden:
            return ""
        self._open.append(token_id)
        if not self._open_text(len(self._open)).endswith(_REPLACEMENT):
            return self._send(len(self._open))
        # The last character is unfinished, or it was never one: then the text must not wait for
        # ever.
        return self._send(self._clean_cut()) if len(self._open) > _PATIENCE else ""

    def finish(self) -> str:
        """Return whatever is left."""
        return self._send(len(self._open))

    def _clean_cut(self) -> int:
        """Return how many of the open ids, but not all, end between two characters; 0 if none."""
        whole = self._decode(self._open)
        for count in range(len(self._open) - 1, 0, -1):
            if self._decode(self._open[:count]) + self._decode(self._open[count:]) == whole:
                return count
        return 0

    def _send(self, count: int) -> str:
        text = self._open_text(count)
        if count:
            self._sent, self._open = self._open[:count], self._open[count:]
        return text

    def _open_text(self, count: int) -> str:
        """Return what the first `count` open ids add to the last piece."""
        sent_text = self._decode(self._sent)
        return self._decode(self._sent + self._open[:count])[len(sent_text) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
