"""Text <-> token ids: a Hugging Face tokenizer, or bytes. Both save as Hugging Face directories."""

import bisect
import functools
import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ithaka.config import ConfigError, input_error
from ithaka.data.conversation import CharRange, ChatTemplate

Trained = Sequence[CharRange] | None
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A Hugging Face tokenizer as the data code and the loop need it.

    `document_prefix` holds what the tokenizer itself puts before a text (bos for Llama, nothing for Qwen) and `eos_id`,
    where there is one, ends each document.
    """

    def __init__(self, hf: Any):
        self.hf = hf
        self.bos_id: int | None = hf.bos_token_id
        self.eos_id: int | None = hf.eos_token_id
        # Fills the end of an epoch; its labels are ignored, so any valid id will do.
        self.pad_id: int = next((i for i in (hf.pad_token_id, self.eos_id) if i is not None), 0)
        # Ids may have holes and added tokens: what a model must hold is the largest id, not the count.
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        adds_bos = self.bos_id is not None and hf("a")["input_ids"][:1] == [self.bos_id]
        self.document_prefix: tuple[int, ...] = (self.bos_id,) if adds_bos and self.bos_id is not None else ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the ids that texts get: the vocabulary, what surrounds a document, and one sentence's ids."""
        words = sorted(self.hf.get_vocab().items())
        ids = self.encode_batch(["The quick brown fox; 1234567 x 89,\n\tif (a != b): naïve 日本語 🎉"])[0].tolist()
        chat = [self.hf.chat_template] if self.hf.chat_template else []
        return hashlib.sha256(repr((words, self.document_prefix, self.eos_id, ids, *chat)).encode()).hexdigest()[:16]

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.hf)

    def encode_batch(self, texts: Sequence[str], trained: Sequence[Trained] | None = None) -> list[np.ndarray]:
        """-> one int32 array a text, without special tokens; the tokenizers library spreads a batch over the cores.

        trained: of each text, the spans to train (None: all). Outside of them, ids are marked as in Documents: a token
        is trained if its first character is. A byte-level tokenizer may not count the space before a word as its first.
        """
        if not texts:
            return []
        # verbose=False: documents longer than model_max_length are what this library is for.
        encoded = self.hf(
            list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False,
            verbose=False, truncation=False, padding=False,
        )  # fmt: skip
        found = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        for i, spans in enumerate(trained or ()):
            if spans is not None and not encoded.is_fast:
                raise ConfigError("the tokenizer has no tokenizer.json, which messages and completions need; make one")
            if spans is not None:
                found[i] = _marked(found[i], [_first_token(encoded.encodings[i], edge) for edge in chain(*spans)])
        return found

    def decode(self, ids: Any) -> str:
        """The text, special tokens included."""
        return self.hf.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are the bytes of the UTF-8 text, then bos, eos and pad.

    It is a byte-level BPE without merges, so that any program reading Hugging Face tokenizers agrees with
    it; the special tokens are never read from text, so "<|eos|>" in a document is seven bytes.
    """

    def __init__(self) -> None:
        backend = Backend(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
        how = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=backend, **names, **how))

    def encode_batch(self, texts: Sequence[str], trained: Sequence[Trained] | None = None) -> list[np.ndarray]:
        found = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
        for i, spans in enumerate(trained or ()):
            if spans is not None:
                edges = [0, *chain(*spans)]
                lengths = [len(texts[i][low:high].encode()) for low, high in pairwise(edges)]
                found[i] = _marked(found[i], list(accumulate(lengths)))
        return found


def _marked(ids: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """`edges`: where what is trained starts and ends, by turns."""
    marked = ~ids
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        marked[low:high] = ids[low:high]
    return marked


def _first_token(encoding: Any, place: int) -> int:
    """The first token with a character at `place` or later; one of no width there is the space before it."""
    return bisect.bisect_left(range(len(encoding)), (place, place + 1), key=encoding.token_to_chars)


def load_tokenizer(name: str | None, model_path: Path | None, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer `data.tokenizer` names, with the template in the file `data.chat_template`, where one is given."""
    tokenizer = _load(name, model_path)
    if chat_template is not None:
        try:
            tokenizer.hf.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            words = f"data.chat_template={chat_template} cannot be read ({error}); give a file"
            raise input_error(words, error) from error
    return tokenizer


def _load(name: str | None, model_path: Path | None) -> Tokenizer:
    """`name` is "bytes", a directory, or None = the model's.

    An embedded model (`model_path` None) is a byte model. Raises ConfigError where there is none.
    """
    if name == "bytes" or (name is None and model_path is None):
        return ByteTokenizer()
    field, path = f"data.tokenizer={name}", Path(name or ".").expanduser()
    if name is None and model_path is not None:
        field, path = f"model.path={model_path}", model_path
    path = path.parent if path.suffix == ".json" else path
    # Where there is none, transformers may make an empty one.
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(f"{field} holds no tokenizer; set data.tokenizer to a directory with one, or to bytes")
    alone = (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file()
    try:
        if alone:
            hf = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
        else:
            hf = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        words = f"{field}: tokenizer not loaded ({error}); repair it or set data.tokenizer"
        raise input_error(words, error) from error
    if alone and (path / "config.json").is_file():
        # It names no eos; the model's config.json may.
        eos = json.loads((path / "config.json").read_text()).get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        hf.eos_token = hf.convert_ids_to_tokens(eos) if isinstance(eos, int) else None
    return Tokenizer(hf)
