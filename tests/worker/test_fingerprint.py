import os
from dataclasses import fields, replace

import pytest

from openbook.worker.fingerprint import (
    FingerprintFields,
    digest_config,
    digest_files,
    digest_tokenizer,
)
from openbook.worker.models import load_model

FIELDS = FingerprintFields(
    weights="w", config="c", tokenizer="t", rope="r", compute_dtype="float32"
)


@pytest.mark.parametrize("name", [field.name for field in fields(FingerprintFields)])
def test_each_field_alone_changes_the_fingerprint(name: str) -> None:
    changed = replace(FIELDS, **{name: getattr(FIELDS, name) + "x"})
    assert changed.digest() != FIELDS.digest()


def test_values_cannot_slide_between_fields() -> None:
    assert replace(FIELDS, weights="wc", config="").digest() != FIELDS.digest()
    assert replace(FIELDS, weights="c", config="w").digest() != FIELDS.digest()


def test_fingerprint_is_the_same_in_every_process() -> None:
    assert FIELDS.digest() == "069ecfeed7babd13567d31c78401aced92595b33cc40c44e844509eaae527d37"


def test_layout_and_kv_dtype_are_part_of_it() -> None:
    stored = {
        FIELDS.stored_as(prompt_layout=layout, kv_dtype=kv_dtype).digest()
        for layout in ("chat", "completion")
        for kv_dtype in ("float16", "float32", "bfloat16")
    }
    assert len(stored | {FIELDS.digest()}) == 7


def test_files_are_read_although_size_and_time_are_unchanged(tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    os.utime(file, (1, 1))
    before = digest_files([file])
    file.write_bytes(b"two")
    os.utime(file, (1, 1))
    assert digest_files([file]) != before


def test_files_count_by_name_and_not_by_order(tmp_path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    before = digest_files([one, two])
    assert digest_files([two, one]) == before
    one.write_bytes(b"two")
    two.write_bytes(b"one")
    assert digest_files([one, two]) != before


def test_config_noise_does_not_count_and_numbers_do() -> None:
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}, "_name_or_path": "here"}
    noisy = {**config, "_name_or_path": "there", "transformers_version": "9"}
    assert digest_config(noisy) == digest_config(config)
    assert digest_config({**config, "hidden_size": 65}) != digest_config(config)
    assert digest_config({**config, "rope_parameters": {"rope_theta": 2e4}}) != digest_config(
        config
    )


def test_tokenizer_parts_each_count() -> None:
    def digest(serialised="{}", chat_template="a", special_tokens=None) -> str:
        special = special_tokens or {"eos": "b"}
        return digest_tokenizer(serialised, chat_template=chat_template, special_tokens=special)

    assert len({digest(), digest("[]"), digest(chat_template="b"), digest(chat_template=None),
                digest(special_tokens={"eos": "c"})}) == 5  # fmt: skip


def test_two_loads_of_one_model_agree(tiny_directory, tiny_model) -> None:
    again = load_model(tiny_directory())
    assert again.fingerprint == tiny_model().fingerprint
    assert again.fingerprint_for("chat", "float16") == tiny_model().fingerprint_for(
        "chat", "float16"
    )
    assert again.fingerprint_for("chat", "float16") != again.fingerprint
