"""Choose the next token of an answer from the model's scores.

Owns the parameters of that choice and their limits. Knows nothing of text, stops or the model. The
arithmetic is transformers' own logits processors, the randomness a generator of this answer alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from openbook.worker.errors import BadAsk, NonFiniteLogits

ANSWER_TOKENS_LIMIT = 1 << 20  # more is a mistake; what the positions leave is a smaller number
STOPS_LIMIT = 16
STOP_CHARACTERS_LIMIT = 256  # every streamed piece is compared with all of them
TEMPERATURE_LEAST = 1e-6  # below it the best id has all the weight, and scores overflow
TEMPERATURE_LIMIT = 100.0  # beyond it the choice is uniform, and scores underflow


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to choose: `temperature` below a millionth is greedy, whatever `top_p` and `seed` are.

    `seed` makes a sampled answer repeatable; None draws a fresh one. Raises BadAsk naming the
    field.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= TEMPERATURE_LIMIT:  # also false for NaN
            raise BadAsk("temperature", f"must be between 0 and {TEMPERATURE_LIMIT:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise BadAsk("top_p", "must be above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise BadAsk("seed", "must be between 0 and 2^63 - 1")


def check_answer_limits(*, max_tokens: int, stop: Sequence[str]) -> None:
    """Check how an answer may end. Raises BadAsk naming `max_tokens` or `stop`."""
    if not 1 <= max_tokens <= ANSWER_TOKENS_LIMIT:
        raise BadAsk("max_tokens", f"must be between 1 and {ANSWER_TOKENS_LIMIT}, is {max_tokens}")
    if isinstance(stop, str):
        raise BadAsk("stop", "must be a list of strings")
    if len(stop) > STOPS_LIMIT:
        raise BadAsk("stop", f"may hold {STOPS_LIMIT} strings, holds {len(stop)}")
    for place, text in enumerate(stop):
        if not text:
            raise BadAsk("stop", f"string {place} is empty")
        if len(text) > STOP_CHARACTERS_LIMIT:
            raise BadAsk(
                "stop", f"string {place} is longer than {STOP_CHARACTERS_LIMIT} characters"
            )


class Sampler:
    """Chooses the tokens of one answer, in order.

    Owns the answer's random state: the same settings with a seed, fed the same scores, choose the
    same ids on every device, whatever else the process samples.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self._greedy = settings.temperature < TEMPERATURE_LEAST
        self._warpers = LogitsProcessorList()
        self._generator = torch.Generator()  # on the CPU, so that a seed means one thing
        self._step = 0
        if self._greedy:
            return
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed)
        if settings.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(settings.temperature))
        if settings.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(settings.top_p))

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next id from scores (vocabulary,), any float type; -inf forbids an id.

        Greedy takes the first of equal maxima. Raises NonFiniteLogits for NaN, +inf, or all -inf:
        such scores choose some id without a sign that it means nothing.
        """
        step, self._step = self._step, self._step + 1
        highest = float(logits.max())  # NaN if any is
        if not math.isfinite(highest):
            raise NonFiniteLogits(step)
        if self._greedy:
            return int(logits.argmax())
        scores = logits.detach().to("cpu", torch.float32).unsqueeze(0)  # (1, vocabulary)
        # No processor used here looks at the ids so far.
        no_ids: Any = torch.empty((1, 0), dtype=torch.long)
        warped: Any = self._warpers(no_ids, scores - highest)
        chosen = torch.multinomial(warped.softmax(-1), 1, generator=self._generator)
        return int(chosen)
