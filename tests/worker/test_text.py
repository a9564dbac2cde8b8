import random
import string

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from openbook.worker.models import Model
from openbook.worker.text import StopFinder, TextStream

REPLACEMENT = "\ufffd"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
END_OF_ANSWER = "END OF ANSWER"


def stream(
    tokenizer: tokenizers.Tokenizer, ids: list[int], stop: tuple[str, ...] = ()
) -> list[str]:
    """Return every piece of an answer, the one at the end last."""
    answer = TextStream(tokenizer, stop)
    return [*(answer.push(each) for each in ids), answer.finish()]


def bytes_tokenizer(decoder: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of 256 ids, each one byte, in one of the two ways such files have it."""
    if decoder == "fallback":
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "\u2581a": 257}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
        return tokenizer
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    vocab = {letter: byte for byte, letter in letters.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def byte_level() -> tokenizers.Tokenizer:
    return bytes_tokenizer("level")


def test_pieces_join_to_the_decoding_of_all_ids(tiny_model) -> None:
    tokenizer = tiny_model().vocabulary.marked
    text = "The keeper walks; 1 2 3.\n\n naïve \u65e5\u672c\u8a9e " + FAMILY
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == text


@pytest.mark.parametrize("ids", [[10813, 242, 218], [177, 132, 126]])
def test_case_b51_split_character_never_streams_as_replacement(smollm2: Model, ids) -> None:
    tokenizer = smollm2.vocabulary.marked
    character = tokenizer.decode(ids)
    assert len(character.strip()) == 1 and REPLACEMENT not in character
    assert stream(tokenizer, ids) == ["", "", character, ""]


def test_case_b51_family_emoji_streams_whole(smollm2: Model) -> None:
    tokenizer = smollm2.vocabulary.marked
    ids = tokenizer.encode(FAMILY, add_special_tokens=False).ids
    assert len(ids) > 10, "the emoji must be split for this to say anything"
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == FAMILY
    assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("kept", [1, 2])
def test_case_b51_cut_character_is_one_replacement_at_the_end(smollm2: Model, kept) -> None:
    tokenizer = smollm2.vocabulary.marked
    ids = [*tokenizer.encode("light", add_special_tokens=False).ids, *[10813, 242, 218][:kept]]
    pieces = stream(tokenizer, ids)
    assert REPLACEMENT not in "".join(pieces[:-1])
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count(REPLACEMENT) == 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_join_to_their_decoding(byte_level, data: bytes) -> None:
    pieces = stream(byte_level, list(data))
    assert "".join(pieces) == byte_level.decode(list(data)) == data.decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_valid_text_never_shows_a_replacement(byte_level, text: str) -> None:
    pieces = stream(byte_level, list(text.encode()))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


def test_garbage_does_not_wait_for_the_end(byte_level) -> None:
    pieces = stream(byte_level, [0xF0] * 100)
    assert "".join(pieces) == REPLACEMENT * 100
    assert len("".join(pieces[:-1])) > 80, "a run of bytes that are no text was held back"


def test_garbage_does_not_break_the_character_after_it(byte_level) -> None:
    ids = [0xF0] * 30 + list("\U0001f600".encode()) + [0xF0] * 30
    assert "".join(stream(byte_level, ids)) == REPLACEMENT * 30 + "\U0001f600" + REPLACEMENT * 30


def test_first_space_is_dropped_once_by_decoders_that_drop_it() -> None:
    tokenizer = bytes_tokenizer("fallback")
    ids = [257, 257, 256, 257, *"\U0001f600\U0001f600".encode(), 257]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "a a  a\U0001f600\U0001f600 a"
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_a_hidden_token_between_words_costs_no_space() -> None:
    tokenizer = bytes_tokenizer("fallback")
    tokenizer.add_special_tokens(["<mark>"])
    mark = tokenizer.token_to_id("<mark>")
    assert "".join(stream(tokenizer, [257, mark, 257])) == "a a"


def test_case_b53_special_tokens_are_not_shown(tiny_model) -> None:
    tokenizer = tiny_model().vocabulary.marked
    ids = tokenizer.encode("the light", add_special_tokens=False).ids
    assert "".join(stream(tokenizer, [1, *ids[:1], 2, 0, *ids[1:], 2])) == "the light"


def test_a_piece_does_not_decode_the_whole_answer(tiny_model) -> None:
    marked = tiny_model().vocabulary.marked
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name):
            return getattr(marked, name)

        def decode(self, ids, *, skip_special_tokens):
            decoded.append(len(ids))
            return marked.decode(ids, skip_special_tokens=skip_special_tokens)

    stream(Counting(), marked.encode(" the light" * 300, add_special_tokens=False).ids)
    assert max(decoded) <= 40


@pytest.mark.parametrize("stop", [END_OF_ANSWER, "\n\nQuestion:", "###", "e"])
def test_case_b52_stop_split_over_tokens_is_cut_exactly(smollm2: Model, stop: str) -> None:
    tokenizer = smollm2.vocabulary.marked
    before = "A light on a high hill. " if stop != "e" else "A light on a "
    ids = tokenizer.encode(f"{before}{stop} and more", add_special_tokens=False).ids
    answer = TextStream(tokenizer, (stop,))
    pieces = [answer.push(each) for each in ids] + [answer.finish()]
    assert "".join(pieces) == before
    assert answer.is_stopped


def test_case_b52_near_miss_is_delivered(smollm2: Model) -> None:
    tokenizer = smollm2.vocabulary.marked
    ids = tokenizer.encode("light END OF ANS", add_special_tokens=False).ids
    answer = TextStream(tokenizer, (END_OF_ANSWER,))
    pieces = [answer.push(each) for each in [*ids, 2]]
    assert "".join(pieces) == "light "
    assert answer.finish() == "END OF ANS"
    assert not answer.is_stopped


def test_case_b52_near_miss_in_the_middle_is_delivered() -> None:
    finder = StopFinder((END_OF_ANSWER,))
    assert finder.push("END OF ") == ""
    assert finder.push("THE WORLD") == "END OF THE WORLD"


@pytest.mark.parametrize("stop", [("ab", "abcd"), ("abcd", "ab"), ("bc", "abcd")])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_case_b52_stop_inside_another_cuts_alike_however_split(stop, size) -> None:
    finder, text = StopFinder(stop), "xx abcd yy"
    sent = "".join(finder.push(text[at : at + size]) for at in range(0, len(text), size))
    assert sent == ("xx a" if "bc" in stop else "xx ")
    assert finder.is_found


@pytest.mark.parametrize("stop", ["\u200d", "\U0001f469"])
def test_case_b52_stop_inside_an_emoji(smollm2: Model, stop: str) -> None:
    tokenizer = smollm2.vocabulary.marked
    ids = tokenizer.encode("light " + FAMILY, add_special_tokens=False).ids
    sent = "".join(stream(tokenizer, ids, (stop,)))
    assert sent == ("light " + FAMILY).split(stop)[0]
    assert REPLACEMENT not in sent


def test_case_b52_empty_stop_is_refused(tiny_model) -> None:
    with pytest.raises(ValueError, match="empty stop"):
        TextStream(tiny_model().vocabulary.marked, ("a", ""))


def test_nothing_follows_a_stop(tiny_model) -> None:
    tokenizer = tiny_model().vocabulary.marked
    answer = TextStream(tokenizer, ("#",))
    for each in tokenizer.encode("#", add_special_tokens=False).ids:
        answer.push(each)
    assert answer.is_stopped
    assert answer.push(80) == answer.finish() == ""


def first_completed(text: str, stops: tuple[str, ...]) -> str:
    """Cut `text` as slowly and plainly as can be written."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    st.integers(0, 1 << 30),
)
def test_stop_finder_equals_the_plain_search(text: str, stops: list[str], seed: int) -> None:
    finder, sent, at, chance = StopFinder(stops), "", 0, random.Random(seed)
    while at < len(text):
        size = chance.randint(1, 6)
        sent += finder.push(text[at : at + size])
        at += size
        assert first_completed(text, tuple(stops)).startswith(sent), "sent what a stop claims"
    assert sent + finder.finish() == first_completed(text, tuple(stops))


def test_text_that_cannot_begin_a_stop_is_sent_at_once() -> None:
    finder = StopFinder(("###",))
    assert [finder.push(letter) for letter in string.ascii_letters] == list(string.ascii_letters)
