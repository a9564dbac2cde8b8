"""Turn documents, questions and templates into token ids.

Owns the prompt layouts and the two tokenizers of a model: one for the template's own text, one for
what users wrote. Knows nothing of attention or of how ids are run.

A context is a list of ids and an ask appends ids to it; nothing is tokenised again across the seam:

    layout       context                                 what an ask appends
    chat         template before the text ‖ document     "\\n\\n" question ‖ template after ‖ prefix
    completion   beginning-of-text, if any ‖ document    "\\n\\n" question prefix
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import numpy as np
import tokenizers
from numpy.typing import NDArray

from openbook.worker.errors import (
    BadAsk,
    DocumentEmpty,
    DocumentTooLong,
    LayoutUnavailable,
    NotText,
    QuestionTooLong,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT = "chat"
COMPLETION = "completion"
SEPARATOR = "\n\n"  # between the document and the question: a blank line
SLICE_CHARACTERS = 1 << 16  # of a long document, tokenised apart to see whether it is too long
SLICE_TOKENS_OFF = 256  # a cut may split one token into as many, and surely no more
HOPELESS_FACTOR = 8  # so many times too long, and it is not counted on
USER_TEXT = "openbook-user-text-7f3a"  # stands for the user's text while a template is rendered
# A template that prints today's date would give one document other ids every day: the date is
# fixed.
FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro %}"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The template's own ids around the user's text: `prefix` before it, `suffix` after it."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizers, split by who wrote the text.

    `marked` turns the text of a special token into that token: for templates, and for decoding.
    `plain` never does: for users' text. Neither is ever reconfigured, so both may be shared by
    threads.
    """

    marked: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer
    special_ids: frozenset[int]
    bos_id: int | None  # the id that the tokenizer itself puts before a text
    chat: ChatFrame | None

    @property
    def layouts(self) -> tuple[str, ...]:
        """Name the prompt layouts that this model has, the default first."""
        return (CHAT, COMPLETION) if self.chat is not None else (COMPLETION,)


class SpeaksTokens(Protocol):
    """What this module needs of a model."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the model's tokenizers."""

    @property
    def positions_max(self) -> int:
        """Return how many positions the model has."""


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """A document as the model sees it.

    `ids` int32 (n,). `offsets` int32 (n, 2): the characters [start, end) of the document that each
    token covers, (-1, -1) for the template's own tokens. Tokens that share one character share its
    offsets.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)


def document_tokens(model: SpeaksTokens, document: bytes, layout: str) -> DocumentTokens:
    """Tokenise a document under a prompt layout.

    A byte-order mark and NUL bytes are text like any other and are kept. Raises NotText (with the
    byte offset), DocumentEmpty for no text or whitespace alone, DocumentTooLong, LayoutUnavailable.
    """
    prefix = _prefix(model.vocabulary, layout)
    text = _text_of(document)
    _refuse_hopeless(model, text)
    encoding = _encoded(model.vocabulary.plain, text)
    ids = np.array([*prefix, *encoding.ids], dtype=np.int32)  # (n,)
    if len(ids) > model.positions_max:
        raise DocumentTooLong(len(ids), model.positions_max)
    offsets = np.full((len(ids), 2), -1, dtype=np.int32)  # (n, 2)
    offsets[len(prefix) :] = encoding.offsets
    return DocumentTokens(ids, offsets)


def _refuse_hopeless(model: SpeaksTokens, text: str) -> None:
    """Refuse a long document by its beginning. Raises DocumentTooLong."""
    least = _least_tokens(model, text)
    if least > model.positions_max:
        raise DocumentTooLong(least, model.positions_max, is_least=True)


def _least_tokens(model: SpeaksTokens, text: str) -> int:
    """Return how many tokens a text has at least, as far as that matters; 0 for a short text.

    Tokenised whole, a text needs about a kilobyte per character: tens of megabytes of a document
    that is refused anyway would need all memory there is.
    """
    least = 0
    for first in range(0, len(text) - SLICE_CHARACTERS, SLICE_CHARACTERS):
        piece = text[first : first + SLICE_CHARACTERS]
        least += max(0, len(_encoded(model.vocabulary.plain, piece)) - SLICE_TOKENS_OFF)
        if least > HOPELESS_FACTOR * model.positions_max:
            break
    return least


def _encoded(plain: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Tokenise a text without the interpreter's lock, which `encode` keeps and a batch does not."""
    (encoding,) = plain.encode_batch([text], add_special_tokens=False)
    return encoding


def count_tokens(model: SpeaksTokens, document: bytes, layout: str) -> int:
    """Count the context tokens that a document costs, template included.

    Raises what `document_tokens` raises: a document that would be refused has no cost.
    """
    return len(document_tokens(model, document, layout))


def question_tokens(
    model: SpeaksTokens, question: str, answer_prefix: str, layout: str
) -> NDArray[np.int32]:
    """Return the ids, int32 (t,), that an ask appends to a context.

    Raises BadAsk for an empty question or a lone surrogate, QuestionTooLong for one of far more
    tokens than there are positions, LayoutUnavailable.
    """
    vocabulary = model.vocabulary
    _prefix(vocabulary, layout)
    if not question:
        raise BadAsk("question", "is empty")
    _check_encodable("question", question)
    _check_encodable("answer_prefix", answer_prefix)
    least = max(_least_tokens(model, text) for text in (question, answer_prefix))
    if least > model.positions_max:
        raise QuestionTooLong(least, model.positions_max)
    if layout == COMPLETION:
        return _plain_ids(vocabulary, SEPARATOR + question + answer_prefix)
    assert vocabulary.chat is not None, "_prefix refuses a layout without its frame"
    suffix = np.array(vocabulary.chat.suffix, dtype=np.int32)
    asked = _plain_ids(vocabulary, SEPARATOR + question)
    return np.concatenate([asked, suffix, _plain_ids(vocabulary, answer_prefix)])


def answer_tokens_max(
    model: SpeaksTokens, *, context_tokens: int, question_tokens: int, max_tokens: int
) -> int:
    """Return how many tokens an answer may have: `max_tokens`, or what the positions leave.

    The last token of an answer is never run through the model and needs no position, so a prompt
    that fills every position still has one token of answer. Raises QuestionTooLong when there is
    none.
    """
    room = model.positions_max - context_tokens - question_tokens + 1
    if room < 1:
        raise QuestionTooLong(question_tokens, max(0, model.positions_max - context_tokens))
    return min(max_tokens, room)


def read_vocabulary(tokenizer: "PreTrainedTokenizerBase", *, model: str) -> Vocabulary:
    """Build both tokenizers and the chat frame of a model from its transformers tokenizer.

    Raises UnsupportedModel when there is no Rust tokenizer, or when the text of a special token
    would become that token although a user wrote it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel(model, "its tokenizer has no tokenizer.json form")
    marked = tokenizers.Tokenizer.from_str(backend.to_str())
    marked.no_truncation()
    marked.no_padding()
    plain = _plain_tokenizer(backend)
    special_ids = _special_ids(tokenizer, marked)
    for special in sorted(special_ids):
        text = marked.id_to_token(special)
        if special == tokenizer.unk_token_id or not text:
            continue
        if special in plain.encode(text, add_special_tokens=False).ids:
            raise UnsupportedModel(model, f"its tokenizer reads token {special} out of plain text")
    bos_id = _added_bos(tokenizer, marked)
    chat = _chat_frame(tokenizer, marked, bos_id)
    return Vocabulary(marked, plain, special_ids, bos_id, chat)


def _text_of(document: bytes) -> str:
    try:
        text = document.decode("utf-8")
    except UnicodeDecodeError as error:
        # Without `from None` the traceback would carry the user's bytes.
        raise NotText(error.start) from None
    if not text.strip():
        raise DocumentEmpty
    return text


def _check_encodable(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadAsk(field, f"has half a surrogate pair at character {error.start}") from None


def _plain_ids(vocabulary: Vocabulary, text: str) -> NDArray[np.int32]:
    return np.array(_encoded(vocabulary.plain, text).ids, dtype=np.int32)


def _prefix(vocabulary: Vocabulary, layout: str) -> tuple[int, ...]:
    """Return the ids before the document. Raises LayoutUnavailable."""
    if layout not in vocabulary.layouts:
        raise LayoutUnavailable(layout, vocabulary.layouts)
    if layout == CHAT and vocabulary.chat is not None:
        return vocabulary.chat.prefix
    return () if vocabulary.bos_id is None else (vocabulary.bos_id,)


def _plain_tokenizer(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Copy a tokenizer into one for users' text: no special token, nothing added at the seams.

    Added tokens of letters or marks (such as tool-call tags) count as special whether or not their
    file says so; runs of whitespace are text. The post-processor goes because it trims offsets, the
    dummy space before the first word because a question is not the start of a text.
    """
    described: dict[str, Any] = json.loads(backend.to_str())
    described.update(truncation=None, padding=None, post_processor=None)
    for added in described["added_tokens"]:
        added["special"] = bool(added["special"] or added["content"].strip())
    for part in ("normalizer", "pre_tokenizer"):
        described[part] = _without_dummy_space(described[part])
    plain = tokenizers.Tokenizer.from_str(json.dumps(described))
    plain.encode_special_tokens = True
    return plain


def _without_dummy_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer that puts no space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            inner = [_without_dummy_space(step) for step in part[name]]
            part[name] = [step for step in inner if step is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel":
        part["add_prefix_space"] = False
    return part


def _special_ids(
    tokenizer: "PreTrainedTokenizerBase", marked: tokenizers.Tokenizer
) -> frozenset[int]:
    added = marked.get_added_tokens_decoder()
    tagged = {token_id for token_id, token in added.items() if token.content.strip()}
    return frozenset(tagged | set(tokenizer.all_special_ids))


def _added_bos(tokenizer: "PreTrainedTokenizerBase", marked: tokenizers.Tokenizer) -> int | None:
    """Return the beginning-of-text id if the tokenizer puts it before every text, else None."""
    with_added, without = marked.encode("a").ids, marked.encode("a", add_special_tokens=False).ids
    bos_id = tokenizer.bos_token_id
    if isinstance(bos_id, int) and with_added[:1] == [bos_id] and without[:1] != [bos_id]:
        return bos_id
    return None


def _chat_frame(
    tokenizer: "PreTrainedTokenizerBase", marked: tokenizers.Tokenizer, bos_id: int | None
) -> ChatFrame | None:
    """Render the template around a stand-in for the user's text; None where it cannot be split."""
    if not tokenizer.chat_template:
        return None
    try:
        template = tokenizer.get_chat_template()
        if "strftime_now" in template:
            template = FIXED_DATE + template
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": USER_TEXT}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (jinja2.TemplateError, ValueError, TypeError):
        return None  # e.g. several named templates, or one that demands tools
    parts = rendered.split(USER_TEXT) if isinstance(rendered, str) else []
    if len(parts) != 2:
        return None
    prefix, suffix = (_marked_ids(marked, part) for part in parts)
    if bos_id is not None and prefix[:1] != [bos_id]:
        prefix = [bos_id, *prefix]
    return ChatFrame(tuple(prefix), tuple(suffix))


def _marked_ids(marked: tokenizers.Tokenizer, text: str) -> Sequence[int]:
    return list(marked.encode(text, add_special_tokens=False).ids) if text else []
