import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from openbook.worker.errors import ModelMissing, UnsupportedModel
from openbook.worker.models import Model, load_model
from openbook.worker.weights import DIGESTS

from .conftest import SPECIALS, edit_json, plain_logits, save_tiny


def test_a_weight_that_is_missing_is_not_made_up(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelMissing, match="layers.1.self_attn.k_proj"):
        load_model(tmp_path)


def test_a_configuration_of_fewer_layers_than_the_weights_is_refused(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    edit_json(tmp_path / "config.json", num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1"):
        load_model(tmp_path)


def test_truncated_weights_are_refused(tmp_path) -> None:
    file = save_tiny(tmp_path, "llama", 4, 2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelMissing, match="cannot be read"):
        load_model(tmp_path)


def test_pickled_weights_are_never_read(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelMissing, match="pickled"):
        load_model(tmp_path)


def test_code_in_a_directory_is_never_run(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    mark = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit_json(tmp_path / "config.json", model_type="custom-kind", auto_map=auto_map)
    with pytest.raises(UnsupportedModel, match="configuration is refused"):
        load_model(tmp_path)
    assert not mark.exists()


def test_adapters_are_refused_before_their_base_is_fetched(tmp_path) -> None:
    save_tiny(tmp_path, "llama", 4, 2)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "x/y"}))
    with pytest.raises(UnsupportedModel, match="adapter"):
        load_model(tmp_path)


@pytest.mark.parametrize("source", ["no/such/place/at-all", "../nowhere", "missing.gguf", ""])
def test_a_source_that_is_nothing_is_missing(tmp_path, monkeypatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelMissing):
        load_model(source)
    with pytest.raises(ModelMissing, match=r"config\.json"):
        load_model("empty")


def test_hugging_face_id_offline_is_missing_without_a_request(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelMissing, match="not in the local cache"):
        load_model("openbook-tests/no-such-model")


def write_gguf(directory: Path, file: Path) -> None:
    """Write a tiny Llama as llama.cpp's converter would: rows of q and k in its order for RoPE."""
    config = json.loads((directory / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(vocab) - len(SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, tensor in load_file(directory / "model.safetensors").items():
        rows = tensor.numpy()
        for wanted, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if wanted in name:
                halves = rows.reshape(count, 2, -1, rows.shape[1])
                rows = halves.swapaxes(1, 2).reshape(rows.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_gguf(tiny_directory, tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_directory("llama", 6, 2), file)
    return file


def test_case_b15_gguf_equals_the_directory_it_was_written_from(
    tiny_gguf, tiny_model, tmp_path
) -> None:
    own, model = tiny_model("llama", 6, 2), load_model(tiny_gguf, cache=tmp_path / "cache")
    expected = own.module.state_dict()
    for name, weight in model.module.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    ids = [3, 90, 17, 200, 5, 44, 301]
    assert torch.allclose(plain_logits(model, ids), plain_logits(own, ids), atol=1e-5)
    text = "The light of 12  34 <|im_end|>\n"
    read, written = model.vocabulary.marked, own.vocabulary.marked
    assert read.encode(text).ids == written.encode(text).ids
    pieces = read.pre_tokenizer.pre_tokenize_str(text)
    assert pieces == written.pre_tokenizer.pre_tokenize_str(text), "digits are split first"
    assert (model.name, model.eos_ids) == ("tiny", {0, 2})
    assert model.prompt_layouts == ("completion",), "the file has no chat template"


def test_gguf_is_unpacked_once_into_a_private_directory(tiny_gguf, tmp_path) -> None:
    first = load_model(tiny_gguf, cache=tmp_path / "cache")
    (unpacked,) = unpacked_in(tmp_path / "cache")
    assert unpacked.stat().st_mode & 0o777 == 0o700
    before = (unpacked / "model.safetensors").stat().st_mtime_ns
    again = load_model(tiny_gguf, cache=tmp_path / "cache")
    assert (unpacked / "model.safetensors").stat().st_mtime_ns == before
    assert again.fingerprint == first.fingerprint
    assert unpacked_in(tmp_path / "cache") == [unpacked]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", DIGESTS])
def test_a_damaged_cache_is_unpacked_again(tiny_gguf, tmp_path, name: str) -> None:
    loaded = load_model(tiny_gguf, cache=tmp_path).module.state_dict()
    expected = {key: weight.clone() for key, weight in loaded.items()}  # the others are mapped
    (unpacked,) = unpacked_in(tmp_path)
    damaged = bytearray((unpacked / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (unpacked / name).write_bytes(damaged)
    weights = load_model(tiny_gguf, cache=tmp_path).module.state_dict()
    assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())
    assert unpacked_in(tmp_path) == [unpacked]


def test_a_file_that_only_looks_like_gguf_is_refused(tmp_path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(UnsupportedModel):
        load_model(file, cache=tmp_path / "cache")
    assert not unpacked_in(tmp_path / "cache")
    assert not list((tmp_path / "cache" / ".tmp").iterdir()), "a failed unpacking left files"


def test_what_a_killed_unpacking_left_is_swept(tiny_gguf, tmp_path) -> None:
    left = tmp_path / ".tmp" / "left"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    load_model(tiny_gguf, cache=tmp_path)
    assert not left.exists() and len(unpacked_in(tmp_path)) == 1


def unpacked_in(cache: Path) -> list[Path]:
    """Return the models in a cache directory."""
    return [entry for entry in cache.iterdir() if not entry.name.startswith(".")]


def test_case_b15_smollm2_projections_equal_an_independent_dequantisation(
    smollm2: Model, smollm2_gguf: Path
) -> None:
    """The rows of q and k come in llama.cpp's order: pairs beside each other, not half apart."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    weights = smollm2.module.state_dict()
    for layer in (0, 14, 29):
        for name, heads in (("q", 9), ("k", 3), ("v", None)):
            stored = tensors[f"blk.{layer}.attn_{name}.weight"]
            expected = gguf.quants.dequantize(stored.data, stored.tensor_type)  # (rows, 576)
            if heads is not None:
                paired = expected.reshape(heads, 32, 2, 576)
                expected = np.concatenate([paired[:, :, 0], paired[:, :, 1]], axis=1)
                expected = expected.reshape(heads * 64, 576)
            loaded = weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].numpy()
            assert np.array_equal(loaded, expected), (layer, name)


def test_case_b15_smollm2_answers_as_it_should(smollm2: Model) -> None:
    """Wrongly ordered rows load cleanly and then know nothing; this knows capitals."""
    assert (smollm2.shape.query_heads, smollm2.shape.kv_heads) == (9, 3)
    assert smollm2.shape.head_dim == 64 and smollm2.positions_max == 8192
    assert smollm2.name == "SmolLM2-135M-Instruct.Q4_1"
    text = "The capital of France is"
    ids = smollm2.vocabulary.plain.encode(text, add_special_tokens=False).ids
    chosen = int(plain_logits(smollm2, ids)[-1].argmax())
    assert smollm2.vocabulary.marked.decode([chosen]) == " Paris"


def test_tiny_tokenizer_file_is_what_the_model_reads(tiny_directory) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_directory())
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == [0, 1, 2]
