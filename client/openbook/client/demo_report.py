"""What the demo measured: judged, printed as a table, written as JSON.

Knows: figures. Does not know: how they came about.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from openbook.client.console import size
from openbook.client.views import ContextInfo, Receipt, Usage


@dataclass(frozen=True, slots=True)
class Asked:
    """One fact asked: what came back, and when its first piece did, as the client saw it."""

    question: str
    code: str
    text: str
    first_token_s: float
    usage: Usage
    receipt: Receipt

    @property
    def is_right(self) -> bool:
        """Tell whether the answer is the code, whole and alone."""
        return re.fullmatch(rf"\s*{re.escape(self.code)}(?!\d).*", self.text, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The tokens that the first ask after the restart cost, counted twice."""

    question_tokens: int
    by_receipt: int
    by_model: int
    first_token_s: float
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that the demo measured; `fresh` and `restored` hold the same facts."""

    context: ContextInfo
    ingest_s: float
    start_s: float
    restart_s: float
    fresh: tuple[Asked, ...]
    restored: tuple[Asked, ...]
    forwarded: Forwarded
    exact: Receipt
    keys: Receipt
    prefill_first_token_s: float

    def faults(self) -> list[str]:
        """Return what must not be, a line each: wrong answers, tokens forwarded again."""
        faults = []
        for when, round_ in (("before", self.fresh), ("after", self.restored)):
            wrong = sum(not asked.is_right for asked in round_)
            if wrong:
                faults.append(f"{wrong} of {len(round_)} answers are wrong {when} the restart")
        spent = self.forwarded
        if not spent.question_tokens == spent.by_receipt == spent.by_model:
            faults.append(
                f"after the restart a question of {spent.question_tokens} tokens forwarded "
                f"{spent.by_receipt} by the receipt, {spent.by_model} by the model's own count"
            )
        if any(a.receipt.tokens_prefilled != a.usage.question_tokens for a in self.restored):
            faults.append("after the restart an ask prefilled more or less than its question")
        return faults

    def summary(self) -> dict[str, float | int | str]:
        """Return the figures under flat names, units last."""
        timing = self.context.timing
        return {
            "model": self.context.model,
            "context_tokens": self.context.token_count,
            "tokenize_s": timing.tokenize_s,
            "prefill_s": timing.prefill_s,
            "build_s": timing.build_s,
            "write_s": timing.write_s,
            "ingest_s": self.ingest_s,
            "start_s": self.start_s,
            "restart_s": self.restart_s,
            "bytes_on_disk": self.context.bytes_on_disk,
            "kv_bytes_16bit": self.context.kv_bytes_16bit,
            "first_token_fresh_s": self.fresh[0].first_token_s,
            "first_token_fresh_median_s": median(asked.first_token_s for asked in self.fresh),
            "first_token_restored_s": self.forwarded.first_token_s,
            "first_token_restored_median_s": median(a.first_token_s for a in self.restored),
            "first_token_prefill_s": self.prefill_first_token_s,
            "token_ms_exact": self.exact.token_ms,
            "token_ms_keys": self.keys.token_ms,
            "keys_read": self.keys.keys_read,
            "keys_scored": self.keys.keys_scored,
            "centroids_scored": self.keys.centroids_scored,
            "mass_estimated": fmean(asked.receipt.mass_estimated for asked in self.fresh),
            "question_tokens": self.forwarded.question_tokens,
            "tokens_prefilled_restored": self.forwarded.by_receipt,
            "tokens_forwarded_restored": self.forwarded.by_model,
            "facts": len(self.fresh),
            "right_fresh": sum(asked.is_right for asked in self.fresh),
            "right_restored": sum(asked.is_right for asked in self.restored),
        }


def print_figures(figures: Figures, console: Console) -> None:
    """Print the table of the demo."""
    table = Table("measured", "", title="openbook demo", title_justify="left")
    for name, value in _rows(figures):
        table.add_row(name, value)
    console.print()
    console.print(table)


def _rows(figures: Figures) -> list[tuple[str, str]]:
    """Return the table's rows: what, and how much."""
    got = figures.summary()
    context, spent = figures.context, figures.forwarded
    facts = len(figures.fresh)
    share = spent.first_token_s / figures.prefill_first_token_s
    ratio = context.bytes_on_disk / context.kv_bytes_16bit if context.kv_bytes_16bit else 0.0
    stored = f"{size(context.bytes_on_disk)} ({ratio:.2f} × the {size(context.kv_bytes_16bit)})"
    return [
        ("tokens of the document", f"{context.token_count}"),
        ("prefill", f"{context.timing.prefill_s:.1f} s"),
        ("index build", f"{context.timing.build_s:.1f} s"),
        ("write", f"{context.timing.write_s:.1f} s"),
        ("on disk, against its 16-bit keys and values", stored),
        ("answers right before the restart", f"{got['right_fresh']} of {facts}"),
        ("answers right after the restart", f"{got['right_restored']} of {facts}"),
        (
            "tokens forwarded after the restart: question, receipt, model",
            f"{spent.question_tokens}, {spent.by_receipt}, {spent.by_model}",
        ),
        ("time to first token, fresh", f"{got['first_token_fresh_s']:.2f} s"),
        ("  median of the facts", f"{got['first_token_fresh_median_s']:.2f} s"),
        ("time to first token, after the restart", f"{spent.first_token_s:.2f} s"),
        ("  median of the facts", f"{got['first_token_restored_median_s']:.2f} s"),
        ("time to first token, reading all again", f"{figures.prefill_first_token_s:.2f} s"),
        ("  after the restart, as a share of that", f"{share:.1%}"),
        ("per token, budget exact", f"{figures.exact.token_ms:.1f} ms"),
        ("per token, default budget", f"{figures.keys.token_ms:.1f} ms"),
        ("attention mass estimated, not read", f"{got['mass_estimated']:.1%}"),
    ]


def write_json(figures: Figures, path: Path) -> None:
    """Write the figures and every answer as JSON."""
    whole = figures.summary() | {
        "fresh": [asdict(asked) for asked in figures.fresh],
        "restored": [asdict(asked) for asked in figures.restored],
        "receipt_restored_first": asdict(figures.forwarded.receipt),
        "receipt_exact": asdict(figures.exact),
        "receipt_keys": asdict(figures.keys),
    }
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
