"""openbook.client: what users import.

client.py    Client: ingest, ask, contexts, models     ── calls ──> openbook.v1
async_client.py  AsyncClient: the same, awaited        ── calls ──> openbook.v1
  ├─ requests.py  what is sent and how an outcome is read; deadlines
  ├─ retries.py   which calls are tried again, and when
  ├─ uploads.py   a document, checked, hashed, in chunks
  ├─ asks.py      a question and its settings, as a request
  ├─ answer.py    Answer, AsyncAnswer: pieces of text, then the result
  ├─ views.py     ContextInfo, Usage, Receipt, Model: frozen values
  ├─ channel.py   options, TLS, token
  └─ errors.py    the error tree, and the table from the service's reasons to it
cli.py       the `openbook` command: streams, Ctrl-C, exit codes
  ├─ cli_verbs.py     its verbs; console.py what they print
  ├─ cli_contexts.py  `openbook contexts`; cli_options.py what verbs share
  ├─ interrupts.py    Ctrl-C
  └─ cli_checks.py    count, capacity (capacity.py), doctor (doctor.py)
demo.py      `openbook demo`; demo_model.py finds its model
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openbook.client.answer import Answer, AsyncAnswer
    from openbook.client.asks import Budget, Keys, Plan
    from openbook.client.async_client import AsyncClient
    from openbook.client.channel import Tls
    from openbook.client.client import Client
    from openbook.client.errors import OpenbookError
    from openbook.client.uploads import Document
    from openbook.client.views import (
        ContextInfo,
        IngestProgress,
        IngestTiming,
        Layout,
        Model,
        Receipt,
        Result,
        TokenCost,
        Usage,
        Verification,
    )

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "Budget",
    "Client",
    "ContextInfo",
    "Document",
    "IngestProgress",
    "IngestTiming",
    "Keys",
    "Layout",
    "Model",
    "OpenbookError",
    "Plan",
    "Receipt",
    "Result",
    "Tls",
    "TokenCost",
    "Usage",
    "Verification",
]

_NAMES = {  # of each module
    "answer": ("Answer", "AsyncAnswer"),
    "asks": ("Budget", "Keys", "Plan"),
    "async_client": ("AsyncClient",),
    "channel": ("Tls",),
    "client": ("Client",),
    "errors": ("OpenbookError",),
    "uploads": ("Document",),
    "views": (
        "ContextInfo", "IngestProgress", "IngestTiming", "Layout", "Model", "Receipt", "Result",
        "TokenCost", "Usage", "Verification",
    ),
}  # fmt: skip

if not TYPE_CHECKING:  # a checker reads the imports above

    def __getattr__(name):
        """Import what is asked for: the command line must be ready for Ctrl-C before gRPC is."""
        for module, names in _NAMES.items():
            if name == module or name in names:
                found = import_module(f"openbook.client.{module}")
                return found if name == module else getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return [*__all__, *_NAMES]
