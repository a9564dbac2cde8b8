"""Models and tensors: read a document once, answer questions behind it.

The public face; the server imports these names and no module below. The walk, one file per step:

    ingest.py     document ─> tokens.py ─> prefill.py ─> capture.py ─> indexstore ─> sealed draft
                  models.py loads what runs; attention.py is where a model hands over q, k, v
    opened.py     open a context, verified; window.py pins its window on the device
    engine.py     submit ─> schedule ─> run ─> postprocess; an ask is one question
    decode.py     one step: window and tail (device) + retrieval.py (middle) ─> merge.py
    sampling.py   the next id;  text.py  the text that is safe to send;  receipt.py  what it cost

Knows no network and no clock but the one it is given. `errors.py` draws the tree of errors.
"""

from openbook.worker.engine import (
    AnswerEvent,
    Ask,
    AskSpec,
    Delta,
    Engine,
    Failed,
    Finished,
    FinishReason,
)
from openbook.worker.errors import (
    AskError,
    BadAsk,
    DocumentEmpty,
    DocumentError,
    DocumentTooLong,
    EngineClosed,
    IngestCancelled,
    LayoutUnavailable,
    MemoryShort,
    ModelMissing,
    NonFiniteKeys,
    NonFiniteLogits,
    NotText,
    QuestionTooLong,
    UnsupportedModel,
    WorkerError,
)
from openbook.worker.ingest import IngestProgress, IngestSettings, ingest
from openbook.worker.models import Model, ModelShape, load_model
from openbook.worker.opened import OpenedContext
from openbook.worker.receipt import Receipt, Usage
from openbook.worker.tokens import CHAT, COMPLETION, count_tokens

__all__ = [
    "CHAT",
    "COMPLETION",
    "AnswerEvent",
    "Ask",
    "AskError",
    "AskSpec",
    "BadAsk",
    "Delta",
    "DocumentEmpty",
    "DocumentError",
    "DocumentTooLong",
    "Engine",
    "EngineClosed",
    "Failed",
    "FinishReason",
    "Finished",
    "IngestCancelled",
    "IngestProgress",
    "IngestSettings",
    "LayoutUnavailable",
    "MemoryShort",
    "Model",
    "ModelMissing",
    "ModelShape",
    "NonFiniteKeys",
    "NonFiniteLogits",
    "NotText",
    "OpenedContext",
    "QuestionTooLong",
    "Receipt",
    "UnsupportedModel",
    "Usage",
    "WorkerError",
    "count_tokens",
    "ingest",
    "load_model",
]
