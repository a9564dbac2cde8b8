"""What can go wrong in the worker, one class per kind.

Owns the worker's exception tree; knows nothing of gRPC statuses (the server translates). Messages
carry names, numbers and offsets, never a user's text.

WorkerError
├── ModelMissing(source, reason)         no such model, or no safe weights in it
├── UnsupportedModel(model, reason)      the model cannot be served; the reason names what and where
├── LayoutUnavailable(layout, available) the model has no such prompt layout
├── DocumentError
│   ├── DocumentEmpty                    nothing but whitespace
│   ├── DocumentTooLong(tokens, limit)   more tokens than the model has positions
│   ├── MemoryShort(tokens, limit, …)    reading it takes more memory than is left
│   └── NotText(offset)                  not UTF-8 at this byte
├── NonFiniteKeys(layer, head, position) the model computed a NaN or infinity
├── NonFiniteLogits(step)                the same, in the scores of the next token
├── IngestCancelled                      the caller asked to stop
├── EngineClosed                         the engine ended before the answer did
└── AskError
    ├── QuestionTooLong(tokens, limit)   more tokens than are left behind the context, or allowed
    └── BadAsk(field, problem)           a parameter out of range; also a ValueError
"""


class WorkerError(Exception):
    """Base of every error this component raises on purpose."""


class ModelMissing(WorkerError):
    """Report that `source` names no model that can be read safely."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"model {source}: {reason}")
        self.source = source
        self.reason = reason


class UnsupportedModel(WorkerError):
    """Report that a model's architecture or files cannot be served."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model} cannot be served: {reason}")
        self.model = model
        self.reason = reason


class LayoutUnavailable(WorkerError):
    """Report a prompt layout that the model does not have."""

    def __init__(self, layout: str, available: tuple[str, ...]) -> None:
        super().__init__(f"prompt layout not available; this model has {', '.join(available)}")
        self.layout = layout
        self.available = available


class DocumentError(WorkerError):
    """Base of what can be wrong with a document."""


class DocumentEmpty(DocumentError):
    """Report a document with no text in it: no bytes, or whitespace alone."""

    def __init__(self) -> None:
        super().__init__("the document is empty or only whitespace")


class DocumentTooLong(DocumentError):
    """Report a document of `tokens` tokens, or at least so many, for `limit` positions."""

    def __init__(self, tokens: int, limit: int, *, is_least: bool = False) -> None:
        least = "at least " if is_least else ""
        super().__init__(f"the document has {least}{tokens} tokens; the model's limit is {limit}")
        self.tokens = tokens
        self.limit = limit


class MemoryShort(DocumentError):
    """Report a document whose reading takes `needed_bytes` where `left_bytes` are left.

    About `limit` of its `tokens` tokens could be read in them.
    """

    def __init__(self, tokens: int, limit: int, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(
            f"reading the document's {tokens} tokens takes {needed_bytes} bytes of memory and "
            f"{left_bytes} are left, enough for about {limit} tokens"
        )
        self.tokens = tokens
        self.limit = limit
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class NotText(DocumentError):
    """Report bytes that are not UTF-8; `offset` is the first bad byte."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the document is not UTF-8 text at byte {offset}")
        self.offset = offset


class NonFiniteKeys(WorkerError):
    """Report a NaN or infinity among the keys or values that the model computed."""

    def __init__(self, layer: int, head: int, position: int) -> None:
        super().__init__(f"layer {layer}, head {head}, position {position}: not a finite number")
        self.layer = layer
        self.head = head
        self.position = position


class NonFiniteLogits(WorkerError):
    """Report that the model scored the next token with a NaN or an infinity."""

    def __init__(self, step: int) -> None:
        super().__init__(f"answer token {step}: the model's scores are not finite numbers")
        self.step = step


class IngestCancelled(WorkerError):
    """Report that an ingest stopped because its caller asked."""

    def __init__(self) -> None:
        super().__init__("the ingest was cancelled")


class EngineClosed(WorkerError):
    """Report that the engine ended while the ask was queued or running."""

    def __init__(self) -> None:
        super().__init__("the engine was closed before the answer ended")


class AskError(WorkerError):
    """Base of what can be wrong with one ask."""


class QuestionTooLong(AskError):
    """Report a question of `tokens` tokens where `limit` may be asked.

    The limit is what the context leaves of the model's positions, or the server's own.
    """

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the question has {tokens} tokens; at most {limit} can be answered")
        self.tokens = tokens
        self.limit = limit


class BadAsk(AskError, ValueError):
    """Report a parameter of an ask that is out of range."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem
