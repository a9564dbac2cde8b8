import math

import pytest
import torch

from openbook.worker.errors import BadAsk, NonFiniteLogits, WorkerError
from openbook.worker.sampling import (
    ANSWER_TOKENS_LIMIT,
    Sampler,
    SamplingSettings,
    check_answer_limits,
)

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0])


def draw(count: int, logits: torch.Tensor = LOGITS, **fields) -> list[int]:
    sampler = Sampler(SamplingSettings(**fields))
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_takes_the_highest_and_the_first_of_equals() -> None:
    assert draw(3) == [1, 1, 1]
    assert draw(1, torch.tensor([1.0, 7.0, 7.0])) == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-7, 1e-6, 1e-5])
def test_a_tiny_temperature_takes_the_highest(temperature: float) -> None:
    assert draw(3, temperature=temperature, seed=1) == [1, 1, 1]


def test_greedy_ignores_seed_and_top_p() -> None:
    assert draw(5, seed=1, top_p=0.1) == draw(5, seed=2)


def test_same_seed_same_tokens_whatever_else_is_sampled() -> None:
    first = draw(50, temperature=1.0, seed=7)
    torch.rand(1000)
    assert draw(50, temperature=1.0, seed=7) == first
    assert draw(50, temperature=1.0, seed=8) != first


def test_without_a_seed_answers_differ() -> None:
    flat = torch.zeros(1000)
    assert draw(10, flat, temperature=1.0) != draw(10, flat, temperature=1.0)


def test_sampling_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    draw(20, temperature=1.0, seed=1)
    draw(20, temperature=1.0)
    assert torch.equal(torch.rand(4), expected)


def test_frequencies_are_the_softmax_at_the_temperature() -> None:
    drawn = torch.bincount(torch.tensor(draw(20_000, temperature=2.0, seed=1)), minlength=5)
    expected = torch.softmax(LOGITS / 2.0, 0)
    assert torch.allclose(drawn / 20_000, expected, atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # softmax(LOGITS) = 0.032, 0.643, 0.087, 0.237, 0.000: 1 and 3 reach 0.8 together.
    assert set(draw(500, temperature=1.0, top_p=0.8, seed=1)) == {1, 3}
    assert set(draw(500, temperature=1.0, top_p=0.01, seed=1)) == {1}


def test_tiny_temperature_is_nearly_greedy_and_finite() -> None:
    assert draw(20, temperature=1e-6, seed=1) == [1] * 20


def test_huge_scores_do_not_overflow() -> None:
    assert set(draw(20, LOGITS * 1e30, temperature=0.01, seed=1)) == {1}


def test_half_precision_scores_are_sampled_in_float32() -> None:
    half = draw(50, LOGITS.to(torch.bfloat16), temperature=1.0, seed=7)
    assert half == draw(50, temperature=1.0, seed=7)


def test_forbidden_ids_are_never_chosen() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    assert set(draw(200, logits, temperature=1.0, seed=1)) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_numbers_are_an_error(bad: float, temperature: float) -> None:
    sampler = Sampler(SamplingSettings(temperature=temperature, seed=1))
    sampler.choose(LOGITS)
    with pytest.raises(NonFiniteLogits) as raised:
        sampler.choose(torch.tensor([0.0, bad, 1.0]))
    assert raised.value.step == 1


def test_all_ids_forbidden_is_an_error() -> None:
    with pytest.raises(NonFiniteLogits):
        Sampler(SamplingSettings()).choose(torch.full((4,), -math.inf))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 63),
    ],
)
def test_case_b54_bad_settings_name_their_field(field: str, value: float) -> None:
    with pytest.raises(BadAsk) as raised:
        SamplingSettings(**{field: value})
    assert raised.value.field == field
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, WorkerError)


@pytest.mark.parametrize("max_tokens", [0, -1, ANSWER_TOKENS_LIMIT + 1, 2147483648])
def test_case_b54_max_tokens_out_of_range_is_refused(max_tokens: int) -> None:
    with pytest.raises(BadAsk) as raised:
        check_answer_limits(max_tokens=max_tokens, stop=())
    assert raised.value.field == "max_tokens"


@pytest.mark.parametrize("stop", [("",), ("a", ""), ("a",) * 17, ("x" * 257,), "###"])
def test_case_b52_stop_strings_out_of_range_are_refused(stop) -> None:
    with pytest.raises(BadAsk) as raised:
        check_answer_limits(max_tokens=1, stop=stop)
    assert raised.value.field == "stop"


def test_limits_themselves_are_allowed() -> None:
    check_answer_limits(max_tokens=1, stop=())
    check_answer_limits(max_tokens=ANSWER_TOKENS_LIMIT, stop=("x" * 256,) * 16)


def test_no_stop_text_in_the_message() -> None:
    with pytest.raises(BadAsk) as raised:
        check_answer_limits(max_tokens=1, stop=("secret" * 60,))
    assert "secret" not in str(raised.value)
