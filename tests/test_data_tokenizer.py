"""Byte ids are the bytes; a saved tokenizer loads with AutoTokenizer and gives the same ids."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ithaka import config
from ithaka.config import DataConfig
from ithaka.data.open import check_data
from ithaka.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from refusals import assert_refused

BYTES = ByteTokenizer()
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c"]


def word_tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    backend = Backend(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=2,
    )


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    BYTES.hf.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_byte_ids_are_those_of_the_embedded_models():
    assert (BYTES.hf.bos_token_id, BYTES.eos_id, BYTES.pad_id) == (
        config.BOS,
        config.EOS,
        config.PAD,
    )
    assert BYTES.vocab_size == 259 <= config.BYTE_VOCAB


@settings(max_examples=30, deadline=None)
@given(text=st.text())
def test_bytes_equal_the_saved_tokenizer(reloaded, text):
    ids = BYTES.encode_batch([text])[0].tolist()
    assert ids == list(text.encode())
    assert reloaded(text)["input_ids"] == ids
    assert reloaded.decode(ids) == BYTES.decode(ids) == text


def test_every_byte_is_its_own_id_and_special_names_in_text_are_text(reloaded):
    for text in [
        "".join(map(chr, range(0x250))),
        "<|eos|><|bos|> <|pad|>",
        "  a .\r\n\tb , c",
        "\0",
        "",
    ]:
        assert (
            reloaded(text)["input_ids"]
            == BYTES.encode_batch([text])[0].tolist()
            == list(text.encode())
        )
    assert reloaded.convert_tokens_to_ids(["<|bos|>", "<|eos|>", "<|pad|>"]) == [256, 257, 258]


def test_hugging_face_directory_gives_its_own_ids(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), None)
    assert tokenizer.encode_batch(["a b zzz c"])[0].tolist() == [3, 4, 0, 5]
    assert (tokenizer.eos_id, tokenizer.vocab_size, tokenizer.document_prefix) == (2, 6, ())
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", "", "b c"])] == [[3], [], [4, 5]]


def test_bos_is_a_prefix_only_where_the_tokenizer_adds_it():
    tokenizer = Tokenizer(word_tokenizer(adds_bos=True))
    assert tokenizer.document_prefix == (1,)
    assert tokenizer.encode_batch(["a b"])[0].tolist() == [3, 4]


def test_the_default_is_the_models_tokenizer(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "config.json"):
        tokenizer = load_tokenizer(None, path)
        assert tokenizer is not None and tokenizer.vocab_size == 6
    assert isinstance(load_tokenizer(None, None), ByteTokenizer)
    assert isinstance(load_tokenizer("bytes", tmp_path), ByteTokenizer)


def test_tokenizer_json_alone_takes_eos_from_the_models_config(tmp_path):
    word_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert load_tokenizer(None, tmp_path).eos_id == 2
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), None).eos_id == 2


def test_missing_tokenizers_are_named(tmp_path):
    missing = str(tmp_path / "nowhere")
    assert_refused(
        lambda: load_tokenizer(missing, None), f"data.tokenizer={missing}", fix="set data.tokenizer"
    )
    # transformers makes an empty tokenizer of it
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert_refused(
        lambda: load_tokenizer(None, tmp_path), f"model.path={tmp_path}", fix="set data.tokenizer"
    )


def test_vocabulary_larger_than_the_models_is_refused():
    assert_refused(
        lambda: check_data(DataConfig(), 256), "259", "vocab_size=256", fix="data.tokenizer"
    )
    check_data(DataConfig(), 259)
