import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
)

from openbook.worker.errors import UnsupportedModel
from openbook.worker.models import Model, check_config, load_model, rotate, rotation, scale_rope

from .conftest import (
    CONFIGS,
    PlainAttention,
    edit_json,
    plain_logits,
    save_tiny,
    tiny_tokenizer,
)

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STEADY_ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 1024},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
}
LENGTH_ROPE = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 1024,
    },
}


def rope(rope_type: str, extra: dict[str, object]) -> dict[str, object]:
    return {"rope_theta": 10_000.0, "rope_type": rope_type, **extra}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_loads_and_scores_as_transformers_does(kind, tiny_model, tiny_directory) -> None:
    model, directory = tiny_model(kind, 6, 2), tiny_directory(kind, 6, 2)
    own = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ids = [3, 90, 17, 200, 5, 44, 301]
    with torch.inference_mode():
        expected = own(torch.tensor([ids])).logits[0]
    assert torch.allclose(plain_logits(model, ids), expected, atol=1e-4)
    assert (model.shape.query_heads, model.shape.kv_heads, model.shape.group) == (6, 2, 3)
    assert model.shape.layers == len(model.shape.scalings) == 2
    assert model.shape.head_dim == model.shape.value_dim == (32 if kind == "qwen3" else 16)
    assert model.positions_max == 4096


def test_scaling_is_the_models_own(tiny_model) -> None:
    assert tiny_model("granite").shape.scalings == (0.11, 0.11)
    assert tiny_model("llama").shape.scalings == (0.25, 0.25)


def test_a_loaded_model_is_frozen_in_evaluation(tiny_model) -> None:
    model = tiny_model()
    assert not model.module.training and not model.base.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert model.device == torch.device("cpu")


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(32, 8), (28, 4), (12, 12), (9, 3), (4, 1)])
def test_case_b10_serves_whole_groups(tiny_model, query_heads: int, kv_heads: int) -> None:
    shape = tiny_model("llama", query_heads, kv_heads).shape
    assert (shape.query_heads, shape.kv_heads) == (query_heads, kv_heads)


def test_case_b10_refuses_9_over_2(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 9, 3)
    edit_json(tmp_path / "config.json", num_key_value_heads=2)
    with pytest.raises(UnsupportedModel, match="9 query heads .* 2 KV heads") as raised:
        load_model(tmp_path)
    assert raised.value.model == tmp_path.name


def test_case_b10_refuses_9_over_2_in_any_configuration() -> None:
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=2)
    with pytest.raises(UnsupportedModel, match="9 query heads .* 2 KV heads"):
        check_config(config, "tiny")


@pytest.mark.parametrize("rope_type", STEADY_ROPE)
def test_case_b13_serves_rope_that_does_not_see_the_length(tiny_model, rope_type) -> None:
    model = tiny_model(rope_parameters=rope(rope_type, STEADY_ROPE[rope_type]))
    ids = [(7 * place) % 500 + 3 for place in range(1100)]  # crosses original_max at 1,024
    short = plain_logits(model, ids[:50])
    long = plain_logits(model, ids)
    assert torch.equal(plain_logits(model, ids[:50]), short), "a long run changed a short one"
    assert torch.allclose(long[:50], short, atol=1e-4)


@pytest.mark.parametrize("rope_type", LENGTH_ROPE)
def test_case_b13_refuses_rope_that_sees_the_length_by_name(tmp_path, rope_type) -> None:
    extra = LENGTH_ROPE[rope_type]
    save_tiny(tmp_path, "llama", 4, 2, rope_parameters=rope(rope_type, extra))
    with pytest.raises(UnsupportedModel, match=rope_type):
        load_model(tmp_path)


def test_case_b13_refuses_rope_it_does_not_know() -> None:
    config = LlamaConfig()
    config.rope_parameters = rope("spiral", {})
    with pytest.raises(UnsupportedModel, match="spiral"):
        check_config(config, "tiny")


def test_case_b13_refuses_one_bad_rope_among_those_of_the_layers() -> None:
    config = LlamaConfig()
    config.rope_parameters = {"full_attention": rope("default", {}), "other": rope("dynamic", {})}
    with pytest.raises(UnsupportedModel, match="dynamic"):
        check_config(config, "tiny")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(), "sliding_attention"),
        (GptOssConfig(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=4), "sliding_attention"),
        (Qwen3NextConfig(), "linear_attention"),
        (MistralConfig(), "sliding window of 4096"),
        (MambaConfig(), "recurrent|linear_attention|mamba"),
        (JambaConfig(), "recurrent|linear_attention|mamba"),
        (DeepseekV3Config(), "MLA"),
        (T5Config(), "encoder-decoder"),
        (BartConfig(), "encoder-decoder"),
        (GPT2Config(add_cross_attention=True), "cross-attention"),
        (BloomConfig(), "bloom"),
        (PretrainedConfig(), "causal language model"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_other_attention_is_refused_by_name(config, named) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_config(config, "model")


def test_a_model_that_attends_both_ways_is_refused(tmp_path) -> None:
    config = BertConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, is_decoder=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        load_model(tmp_path)


def test_a_window_as_wide_as_the_model_is_served(tiny_model) -> None:
    assert tiny_model("mistral", sliding_window=4096).positions_max == 4096


def test_quantised_checkpoints_are_refused() -> None:
    config = LlamaConfig()
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UnsupportedModel, match="quantised"):
        check_config(config, "tiny")


def test_rope_scale_stretches_theta_and_positions(tiny_directory, tiny_model) -> None:
    plain, scaled = tiny_model(), load_model(tiny_directory(), rope_scale=4.0)
    assert scaled.positions_max == 4 * plain.positions_max == 16_384
    d = plain.shape.head_dim
    theta = 10_000.0 * 4.0 ** (d / (d - 2))
    expected = theta ** -(torch.arange(0, d, 2) / d)
    assert torch.allclose(rotation(scaled).inv_freq, expected, rtol=1e-6)
    assert scaled.fingerprint != plain.fingerprint
    assert scaled.fingerprint_fields.weights == plain.fingerprint_fields.weights


def test_rope_scale_uses_the_rotated_part_of_a_head(tiny_directory) -> None:
    scaled = load_model(tiny_directory("phi3"), rope_scale=2.0)
    theta = 10_000.0 * 2.0 ** (8 / 6)
    assert torch.allclose(rotation(scaled).inv_freq, theta ** -(torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0, math.nan, math.inf])
def test_rope_scale_out_of_range_is_refused(tiny_directory, scale: float) -> None:
    with pytest.raises(ValueError, match="rope_scale"):
        load_model(tiny_directory(), rope_scale=scale)


def test_rope_scale_of_another_rope_type_is_refused() -> None:
    config = LlamaConfig(rope_parameters=rope("linear", {"factor": 2.0}))
    with pytest.raises(UnsupportedModel, match="rope_scale"):
        scale_rope(config, 2.0, "tiny")


def test_dtype_is_refused_or_decides_the_fingerprint(tiny_directory, tiny_model) -> None:
    with pytest.raises(ValueError, match="dtype"):
        load_model(tiny_directory(), dtype="int8")
    half = load_model(tiny_directory(), dtype="bfloat16")
    assert next(half.module.parameters()).dtype is torch.bfloat16
    assert half.fingerprint != tiny_model().fingerprint


def test_tokens_forwarded_is_the_models_own_count(tiny_directory) -> None:
    model = load_model(tiny_directory())
    assert model.tokens_forwarded == 0, "the probe at load is not an ask"
    plain_logits(model, [5, 6, 7])
    plain_logits(model, [8])
    with torch.inference_mode():
        model.base(
            input_ids=torch.full((2, 5), 9),
            position_ids=torch.arange(5).expand(2, 5),
            use_cache=False,
            openbook=PlainAttention(),
        )
    assert model.tokens_forwarded == 3 + 1 + 10


def test_case_b53_every_listed_id_and_known_mark_ends_an_answer(tmp_path, tiny_model) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[2, 77, 78])
    assert load_model(tmp_path).eos_ids == {0, 2, 77, 78}
    assert tiny_model().eos_ids == {0, 2}


def test_case_b53_smollm2_ends_on_end_of_turn_and_end_of_text(smollm2: Model) -> None:
    assert smollm2.eos_ids == {0, 2}


@pytest.mark.parametrize("kind", CONFIGS)
def test_rotation_turns_vectors_as_the_model_does(tiny_model, kind: str) -> None:
    model = tiny_model(kind)
    found = rotation(model)
    assert found is not None
    assert found.rotary_dim == (
        model.shape.head_dim // 2 if kind == "phi3" else model.shape.head_dim
    )
    assert found.inv_freq.shape == (found.rotary_dim // 2,)


def test_rotate_composes_and_keeps_lengths(tiny_model) -> None:
    found = rotation(tiny_model("phi3"))
    vectors = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    by = torch.tensor([0, 1, 100, 5_000, 130_000])
    turned = rotate(vectors, found, by=by)
    assert torch.equal(turned[:, 0], vectors[:, 0])
    assert torch.equal(turned[..., 8:], vectors[..., 8:])
    assert torch.allclose(turned.norm(dim=-1), vectors.norm(dim=-1), atol=1e-5)
    assert torch.allclose(rotate(turned, found, by=-by), vectors, atol=1e-5)


def test_rotation_of_yarn_ignores_its_factor_on_lengths(tiny_model) -> None:
    assert rotation(tiny_model(rope_parameters=rope("yarn", STEADY_ROPE["yarn"]))) is not None


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2),  # interleaved
        SmolLM3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
                      num_hidden_layers=4),  # its fourth layer does not rotate
        GPT2Config(n_embd=64, n_head=4),  # learned positions
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_rotation_is_none_where_the_formula_does_not_hold(tmp_path, config) -> None:
    config.update({"vocab_size": 512, "pad_token_id": 2, "intermediate_size": 64})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert rotation(load_model(tmp_path)) is None
