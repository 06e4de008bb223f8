"""Convert between text and token ids, with a Hugging Face tokenizer or one for bytes."""

import bisect
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ithaka.config import BUILTIN_TEMPLATES, ConfigError, input_error
from ithaka.data.documents.chat import ChatTemplate, TrainedRanges, fix_date, read_builtin_template
from ithaka.data.stored_tokens import encode_tokens

if TYPE_CHECKING:
    from ithaka.data.documents.pixels import ImageReader

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A Hugging Face tokenizer, with the tokens that start and end each document.

    `document_prefix` holds the ids that the tokenizer puts before a text (bos for Llama, none for
    Qwen); `eos_id`, if there is one, ends each document.
    """

    model_path: Path | None = None

    def __init__(self, hf: PreTrainedTokenizerBase):
        self.hf = hf
        self.chat = ChatTemplate(hf)
        self.eos_id: int | None = hf.eos_token_id
        # Padding has no labels, so any valid id will do.
        pad_ids = [i for i in (hf.pad_token_id, hf.eos_token_id) if i is not None]
        self.pad_id: int = pad_ids[0] if pad_ids else 0
        # Ids can have gaps, so the model's vocabulary must cover the largest id, not their number.
        self.vocab_size: int = max(hf.get_vocab().values()) + 1
        adds_bos = hf("a")["input_ids"][:1] == [hf.bos_token_id]
        self.document_prefix: tuple[int, ...] = (hf.bos_token_id,) if adds_bos else ()

    @functools.cached_property
    def images(self) -> "ImageReader":
        """Reads images for the model. Raises ConfigError if the model takes none."""
        from ithaka.data.documents.pixels import ImageReader

        if self.model_path is None:
            raise ConfigError(
                "data.images=read needs a vision-language model; set model.path, or data.images "
                "to drop"
            )
        return ImageReader(self.model_path, self.hf)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash what determines ids: vocabulary, special tokens, a sample, chat template."""
        vocab = sorted(self.hf.get_vocab().items())
        sample = "The quick brown fox; 1234567 x 89,\n\tif (a != b): naïve 日本語 🎉"
        ids = self.encode_batch([sample])[0].tolist()
        chat = [self.hf.chat_template] if self.hf.chat_template else []
        identity = repr((vocab, self.document_prefix, self.eos_id, ids, *chat))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def encode_batch(
        self, texts: Sequence[str], trained: Sequence[TrainedRanges] | None = None
    ) -> list[np.ndarray]:
        """Return the ids of each text, as `encode_documents`."""
        num = len(texts)
        return [ids for ids, _ in self.encode_documents(texts, trained or [None] * num, [()] * num)]

    def encode_documents(
        self,
        texts: Sequence[str],
        trained: Sequence[TrainedRanges],
        starts: Sequence[Sequence[int]],
    ) -> list[tuple[np.ndarray, list[int]]]:
        """Return the tokens of each text, without special tokens, of which those in the `trained`
        ranges are; and the index of the token at each character of `starts`.

        A token is trained on if its first character is. With a byte-level tokenizer, that may be
        the character after the leading space. The tokenizers library uses all cores for a batch.
        """
        if not texts:
            return []
        # verbose=False: no warning about texts longer than model_max_length.
        encoded = self.hf(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            truncation=False,
            padding=False,
        )
        documents = []
        for i, (ranges, chars) in enumerate(zip(trained, starts, strict=True)):
            ids = np.asarray(encoded["input_ids"][i], dtype=np.int32)
            if not encoded.is_fast and ranges is not None:
                raise ConfigError(
                    "the tokenizer has no tokenizer.json, which messages and completions need; "
                    "convert it to a fast tokenizer, or set data.tokenizer to one"
                )
            indices: list[int] = []
            if encoded.is_fast:
                encoding = encoded.encodings[i]
                indices = [_first_token(encoding, char) for char in chars]
                if ranges is not None:
                    ids = _mask_outside(ids, [_first_token(encoding, c) for c in chain(*ranges)])
            documents.append((ids, indices))
        return documents

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text, special tokens included."""
        return self.hf.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text; bos, eos and pad follow.

    It is a byte-level BPE without merges, so it saves and loads as a Hugging Face tokenizer.
    Special tokens are not parsed from text: "<|eos|>" in a document is seven bytes.
    """

    def __init__(self) -> None:
        backend = Backend(
            models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        hf = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<|bos|>",
            eos_token="<|eos|>",
            pad_token="<|pad|>",
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        super().__init__(hf)

    def encode_documents(
        self,
        texts: Sequence[str],
        trained: Sequence[TrainedRanges],
        starts: Sequence[Sequence[int]],
    ) -> list[tuple[np.ndarray, list[int]]]:
        documents = []
        for text, ranges, chars in zip(texts, trained, starts, strict=True):
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
            if ranges is not None:
                ids = _mask_outside(ids, _byte_offsets(text, chain(*ranges)))
            documents.append((ids, _byte_offsets(text, chars)))
        return documents


def _byte_offsets(text: str, chars: Iterable[int]) -> list[int]:
    """Return the bytes before each of these characters, which ascend."""
    sizes = (len(text[low:high].encode()) for low, high in pairwise([0, *chars]))
    return list(accumulate(sizes))


def _mask_outside(ids: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Return tokens that are trained in the ranges. `edges`: start and end of each in turn."""
    is_trained = np.zeros(len(ids), bool)
    for low, high in zip(edges[::2], edges[1::2], strict=True):
        is_trained[low:high] = True
    return encode_tokens(ids, is_trained)


def _first_token(encoding: Any, char: int) -> int:
    """Return the first token that ends after `char`; an empty one there is a leading space."""
    return bisect.bisect_left(range(len(encoding)), (char, char + 1), key=encoding.token_to_chars)


def load_tokenizer(
    name: str | None, model_path: Path | None, chat_template: Path | None = None
) -> Tokenizer:
    """Load the tokenizer of `data.tokenizer`, with `data.chat_template`, a built-in one or a file,
    if given.

    `name` is "bytes", a directory, or None for the model's own; an embedded model (`model_path`
    None) has bytes.
    """
    path = model_path
    setting = f"model.path={model_path}"
    if name is not None:
        path = Path(name).expanduser()
        setting = f"data.tokenizer={name}"
    if name == "bytes" or path is None:
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = _load_pretrained(path, setting)
    tokenizer.model_path = model_path
    if chat_template is not None and str(chat_template) in BUILTIN_TEMPLATES:
        tokenizer.hf.chat_template = read_builtin_template(str(chat_template))
    elif chat_template is not None:
        try:
            tokenizer.hf.chat_template = chat_template.read_text(encoding="utf-8")
            if not tokenizer.hf.chat_template.strip():
                raise ValueError("it is empty")
        except (OSError, ValueError) as error:
            message = (
                f"data.chat_template={chat_template} cannot be read ({error}); set it to a UTF-8 "
                f"text file or a built-in template: {', '.join(BUILTIN_TEMPLATES)}"
            )
            raise input_error(message, error) from error
    template = tokenizer.hf.chat_template
    if isinstance(template, str):
        tokenizer.hf.chat_template = fix_date(template)
        tokenizer.chat.has_fixed_date = tokenizer.hf.chat_template != template
    return tokenizer


def _load_pretrained(path: Path, setting: str) -> Tokenizer:
    path = path.parent if path.suffix == ".json" else path
    # Without any of its files, transformers may create an empty tokenizer.
    if not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{setting} has no tokenizer; set data.tokenizer to a directory with one, or to bytes"
        )
    file = path / "tokenizer.json"
    only_json = file.is_file() and not (path / "tokenizer_config.json").is_file()
    try:
        if only_json:
            hf = PreTrainedTokenizerFast(tokenizer_file=str(file))
        else:
            from transformers import AutoTokenizer  # late: it imports torch

            hf = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, local_files_only=True
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        message = (
            f"{setting}: the tokenizer failed to load ({error}); repair it, or set data.tokenizer"
        )
        raise input_error(message, error) from error
    if only_json and (path / "config.json").is_file():
        # tokenizer.json does not name the eos token, but the model's config.json may.
        eos = json.loads((path / "config.json").read_text()).get("eos_token_id")
        if isinstance(eos, list) and eos:
            eos = eos[0]
        hf.eos_token = hf.convert_ids_to_tokens(eos) if isinstance(eos, int) else None
    return Tokenizer(hf)
