"""Load a model that can be served, or refuse it by name.

Owns the Model that the rest of the worker runs: module, tokenizers, shape, fingerprint, and its own
count of tokens run. Knows nothing of documents, contexts or sessions, and sends nothing over a
network but the download of a Hugging Face id.

Refusal comes in three steps, each as early as it can be: the raw config (numbers that cannot fit),
the config class (layer types, RoPE type, attention kind), and what the attention function really
receives (`attention.probe`).
"""

import math
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from openbook.worker import attention
from openbook.worker.errors import UnsupportedModel
from openbook.worker.fingerprint import (
    FingerprintFields,
    canonical_json,
    digest_config,
    digest_tokenizer,
)
from openbook.worker.tokens import Vocabulary, read_vocabulary
from openbook.worker.weights import locate, read_config, read_module, read_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# RoPE types that rotate a position the same way whatever the total length is.
_STEADY_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# Texts of tokens that end a turn or a text. Files often list only one of theirs as end of sequence,
# and a model that writes the other would run on into a turn that nobody asked for.
_END_MARKS = frozenset(
    {
        "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>",
        "<end_of_turn>", "<|eot|>", "</s>", "<EOT>", "<|endofturn|>", "[|endofturn|]",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that decide what is stored. `scalings` has one factor per layer."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    positions_max: int
    scalings: tuple[float, ...]

    @property
    def group(self) -> int:
        """Return how many query heads share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a model turns a vector by its position: coordinate i pairs with i + rotary_dim / 2.

    A pair turns by position · inv_freq[i]; coordinates from `rotary_dim` on stay. `inv_freq` is
    float32 (rotary_dim / 2,) on the model's device. Any factor on cos and sin is already in the
    captured vectors.
    """

    inv_freq: torch.Tensor
    rotary_dim: int


class TokenCount:
    """Counts the token ids that pass a model's embedding. Safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Return the count so far."""
        with self._lock:
            return self._tokens

    def clear(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._tokens = 0

    def see(self, _module: object, inputs: tuple[torch.Tensor, ...], _output: object) -> None:
        """Add one call of the embedding; the signature is that of a forward hook."""
        with self._lock:
            self._tokens += inputs[0].numel()


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A served model. `base` is `module` without its output head; both attend by `attention`."""

    name: str
    module: PreTrainedModel
    base: PreTrainedModel
    vocabulary: Vocabulary
    shape: ModelShape
    eos_ids: frozenset[int]
    fingerprint_fields: FingerprintFields
    count: TokenCount

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the model alone, without layout or stored number format."""
        return self.fingerprint_fields.digest()

    def fingerprint_for(self, layout: str, kv_dtype: str) -> str:
        """Return the fingerprint of contexts stored under a prompt layout in a number format."""
        return self.fingerprint_fields.stored_as(prompt_layout=layout, kv_dtype=kv_dtype).digest()

    @property
    def tokens_forwarded(self) -> int:
        """Return how many token ids passed through the model since it was loaded."""
        return self.count.tokens

    @property
    def prompt_layouts(self) -> tuple[str, ...]:
        """Name the prompt layouts that this model has, the default first."""
        return self.vocabulary.layouts

    @property
    def positions_max(self) -> int:
        """Return how many positions the model has."""
        return self.shape.positions_max

    @property
    def device(self) -> torch.device:
        """Return the device that token ids must be on."""
        return self.base.device


def load_model(
    source: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    rope_scale: float = 1.0,
    cache: Path | None = None,
) -> Model:
    """Load a model from a Hugging Face id, a directory of safetensors, or a `.gguf` file.

    `rope_scale` s > 1 stretches the positions s-fold by NTK scaling: theta · s^(d/(d-2)). `cache`
    is where the weights of a GGUF file are kept unpacked, by default under $XDG_CACHE_HOME. Raises
    ModelMissing, UnsupportedModel with the reason named, and ValueError for a bad `dtype` or
    `rope_scale`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if not (math.isfinite(rope_scale) and rope_scale >= 1.0):
        raise ValueError(f"rope_scale must be a finite number of at least 1, not {rope_scale}")
    files = locate(source, dtype=DTYPES[dtype], check=check_config, cache=cache)
    config = read_config(files, check_heads)
    scale_rope(config, rope_scale, files.name)
    check_config(config, files.name)
    tokenizer = read_tokenizer(files)
    vocabulary = read_vocabulary(tokenizer, model=files.name)
    module = read_module(files, config, dtype=DTYPES[dtype])
    nn.Module.to(module, device)
    nn.Module.eval(module)
    module.requires_grad_(False)
    attention.register()
    module.set_attn_implementation(attention.NAME)
    shape = _shape(module, config)
    base = module.base_model
    assert isinstance(base, PreTrainedModel), "check_config refuses what has no base model"
    count = TokenCount()
    module.get_input_embeddings().register_forward_hook(count.see)
    return Model(
        name=files.name,
        module=module,
        base=base,
        vocabulary=vocabulary,
        shape=shape,
        eos_ids=_eos_ids(module, tokenizer, vocabulary),
        fingerprint_fields=FingerprintFields(
            weights=files.weights_digest,
            config=digest_config(config.to_dict()),
            tokenizer=_tokenizer_digest(tokenizer, vocabulary),
            rope=_rope_json(config, rope_scale),
            compute_dtype=dtype,
        ),
        count=count,
    )


def check_config(config: PretrainedConfig, name: str) -> None:
    """Refuse a configuration whose model cannot be served. Raises UnsupportedModel, naming why."""
    refuse = _refusal(name)
    _check_layers(config, refuse)
    _check_kind(config, refuse)
    check_heads(_head_counts(config), name)
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise refuse("its configuration states no maximum number of positions")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < positions:
        raise refuse(f"a sliding window of {window} is below its {positions} positions")
    for rope_type in _rope_types(config):
        if rope_type not in _STEADY_ROPE_TYPES:
            raise refuse(f"RoPE type {rope_type!r} rotates by the total length, or is not known")


def check_heads(fields: Mapping[str, object], name: str) -> None:
    """Refuse query heads that do not divide among the KV heads, naming both numbers.

    Fields may be a config.json as it lies on disk; what it leaves out `attention.probe` counts.
    """
    query_heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if not isinstance(query_heads, int) or not isinstance(kv_heads, int):
        return
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        reason = f"{query_heads} query heads are not a multiple of {kv_heads} KV heads"
        raise UnsupportedModel(name, reason)


def scale_rope(config: PretrainedConfig, scale: float, name: str) -> None:
    """Stretch a configuration's positions `scale`-fold by NTK scaling, in place.

    Raises UnsupportedModel unless the model has plain RoPE, the only kind for which the formula
    holds.
    """
    if scale == 1.0:
        return
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "default":
        raise UnsupportedModel(name, "rope_scale needs RoPE type 'default'")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    theta = parameters["rope_theta"] * scale ** (rotary_dim / (rotary_dim - 2))
    config.rope_parameters = {**parameters, "rope_theta": theta}
    config.max_position_embeddings = int(config.max_position_embeddings * scale)


def rotation(model: Model) -> Rotation | None:
    """Return how the model rotates, or None when it is not one turn of split halves in all layers.

    What the model's own code does is tried against the formula: at two positions a vector must
    differ by exactly the turn between them.
    """
    rotary = getattr(model.base, "rotary_emb", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    apply = getattr(sys.modules[type(model.base).__module__], "apply_rotary_pos_emb", None)
    mixed = any(not uses for uses in getattr(model.base.config, "no_rope_layers", None) or [])
    if rotary is None or not isinstance(inv_freq, torch.Tensor) or apply is None or mixed:
        return None
    found = Rotation(inv_freq.float().clone(), 2 * len(inv_freq))
    probe = torch.randn(1, 1, 2, model.shape.head_dim, generator=torch.Generator().manual_seed(0))
    probe = probe[:, :, :1].expand(-1, -1, 2, -1).to(inv_freq.device)  # one vector, two positions
    positions = torch.tensor([[3, 40]], device=inv_freq.device)
    try:
        cos, sin = rotary(probe, positions)
        turned = apply(probe, probe, cos, sin)[0]
    except (TypeError, ValueError, RuntimeError):
        return None
    expected = rotate(turned[:, :, 0], found, by=37)
    return found if torch.allclose(turned[:, :, 1], expected, atol=1e-4) else None


def rotate(vectors: torch.Tensor, rotation: Rotation, *, by: int | torch.Tensor) -> torch.Tensor:
    """Turn vectors (..., d) onward by `by` positions: a number, or one per leading index (...)."""
    half = rotation.rotary_dim // 2
    steps = torch.as_tensor(by, dtype=torch.float64, device=vectors.device)
    angles = steps.unsqueeze(-1) * rotation.inv_freq.to(vectors.device, torch.float64)
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)  # (..., half)
    first, second = vectors[..., :half], vectors[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, vectors[..., 2 * half :]], dim=-1)


Refuse = Callable[[str], UnsupportedModel]


def _refusal(name: str) -> Refuse:
    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(name, reason)

    return refuse


def _check_kind(config: PretrainedConfig, refuse: Refuse) -> None:
    """Refuse what is not a causal language model whose attention can be replaced."""
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder")
    if getattr(config, "add_cross_attention", False) or getattr(
        config, "cross_attention_layers", None
    ):
        raise refuse("it has cross-attention layers")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise refuse("it has multi-head latent attention (MLA)")
    if getattr(config, "quantization_config", None) is not None:
        raise refuse("its weights are quantised; only dense safetensors and GGUF are read")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(f"{config.model_type!r} is not a causal language model of transformers")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise refuse(f"{config.model_type!r} has recurrent layers")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise refuse(f"{config.model_type!r} does not use transformers' AttentionInterface")


def _head_counts(config: PretrainedConfig) -> dict[str, object]:
    """Return the head counts under their usual names, whatever the config calls them."""
    query_heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None)
    return {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads}


def _check_layers(config: PretrainedConfig, refuse: Refuse) -> None:
    """Refuse layers that are not full attention, naming every other type."""
    for field in ("layer_types", "layers_block_type"):
        types = getattr(config, field, None) or ()
        others = sorted(set(types) - {"full_attention", "attention"})
        if others:
            raise refuse(f"layer types {', '.join(others)} are not full attention")


def _rope_types(config: PretrainedConfig) -> list[str]:
    """Return the RoPE types of a config, whose parameters may be nested by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    return [str(each.get("rope_type", "default")) for each in (nested or [parameters])]


def _shape(module: PreTrainedModel, config: PretrainedConfig) -> ModelShape:
    probed = attention.probe(module)
    return ModelShape(
        layers=probed.layers,
        query_heads=probed.query_heads,
        kv_heads=probed.kv_heads,
        head_dim=probed.head_dim,
        value_dim=probed.value_dim,
        positions_max=config.max_position_embeddings,
        scalings=probed.scalings,
    )


def _eos_ids(
    module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> frozenset[int]:
    """Collect every id that ends an answer: what the files list, and marks known by their text."""
    generation: GenerationConfig | None = module.generation_config
    ids: set[int] = set()
    for listed in (
        generation.eos_token_id if generation is not None else None,
        getattr(module.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids.update([listed] if isinstance(listed, int) else listed or [])
    marked = vocabulary.marked
    ids.update(each for each in vocabulary.special_ids if marked.id_to_token(each) in _END_MARKS)
    return frozenset(ids)


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary) -> str:
    return digest_tokenizer(
        vocabulary.marked.to_str(),
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens_map,
    )


def _rope_json(config: PretrainedConfig, scale: float) -> str:
    parameters = getattr(config, "rope_parameters", None)
    positions = config.max_position_embeddings
    return canonical_json({"parameters": parameters, "positions_max": positions, "scale": scale})
