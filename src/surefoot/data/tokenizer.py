"""Text to token ids and back, through a `tokenizers` file. Every document ends in one EOS, which text itself can never produce."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from surefoot.core.errors import ConfigError, DataError

EOS: Final = "<|endoftext|>"
# How the common model families call the token that ends a document, in order of preference.
_EOS_NAMES: Final = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]", "<|im_end|>")
_MIN_BPE_SIZE: Final = 257
_MAX_BPE_SIZE: Final = 1 << 22  # above any vocabulary in use; the trainer allocates by it


class Tokenizer:
    """A `tokenizers` file that knows its EOS. Special tokens spelled out in a text are encoded as the plain characters they are."""

    def __init__(self, json_bytes: bytes, *, where: str = "tokenizer") -> None:
        try:
            self._rust: Any = RustTokenizer.from_str(json_bytes.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception on a file it cannot read
            raise DataError(
                f"not a tokenizer file: {error}", where=where, hint="give a tokenizer.json of Hugging Face tokenizers"
            ) from error
        self._rust.no_truncation()
        self._rust.no_padding()
        self._rust.encode_special_tokens = True
        self.json_bytes = json_bytes
        self.sha256 = hashlib.sha256(json_bytes).hexdigest()
        self.vocab_size: int = max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_id = self._find_eos(where)

    def _find_eos(self, where: str) -> int:
        for name in _EOS_NAMES:
            token_id: int | None = self._rust.token_to_id(name)
            if token_id is not None:
                return token_id
        raise DataError(
            "no token that ends a document", where=where, hint=f"add a special token to it; known names: {', '.join(_EOS_NAMES)}"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without EOS and without the file's own template."""
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; special tokens leave no trace."""
        text: str = self._rust.decode([int(token_id) for token_id in token_ids], skip_special_tokens=True)
        return text

    @cached_property
    def token_num_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, shape (vocab_size,): exact for a byte-level BPE. Special tokens and unused ids are 0."""
        special = {token_id for token_id, token in self._rust.get_added_tokens_decoder().items() if token.special} | {self.eos_id}
        added = set(self._rust.get_added_tokens_decoder())
        is_byte_level = '"ByteLevel"' in json.dumps([json.loads(self.json_bytes).get(part) for part in ("pre_tokenizer", "decoder")])
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self._rust.get_vocab(with_added_tokens=True).items():
            if token_id in special:
                continue
            # The byte-level alphabet writes every byte as one character.
            lengths[token_id] = len(token) if is_byte_level and token_id not in added else _num_bytes_of_piece(token)
        return lengths


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Raises DataError when `path` is missing, is no tokenizer file, or has no EOS."""
    try:
        return Tokenizer(Path(path).read_bytes(), where=str(path))
    except OSError as error:
        hint = "wanted bpe:<size>, bytes, or the path of a tokenizer.json"
        raise DataError(f"cannot read the tokenizer file: {error.strerror}", where=str(path), hint=hint) from error


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, EOS included; the same texts give the same bytes. EOS is id 0."""
    rust = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rust.train_from_iterator(_batched(texts), trainer)
    return Tokenizer(rust.to_str(pretty=False).encode())


def bytes_tokenizer() -> Tokenizer:
    """256 ids that are the bytes themselves, and EOS as id 256. Needs no training."""
    rust = _byte_level(models.BPE(vocab={character: byte for byte, character in enumerate(_byte_alphabet())}, merges=[]), use_regex=False)
    rust.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return Tokenizer(rust.to_str(pretty=False).encode())


def bpe_size(spec: str) -> int | None:
    """The vocabulary of a `bpe:<size>` spec, None for any other spec. Raises ConfigError on a size that is none."""
    if not spec.startswith("bpe:"):
        return None
    digits = spec.removeprefix("bpe:")
    if not digits.isdigit() or not _MIN_BPE_SIZE <= int(digits) <= _MAX_BPE_SIZE:
        hint = f"write bpe:<size> with at least {_MIN_BPE_SIZE}, 256 bytes and EOS, and at most {_MAX_BPE_SIZE}"
        raise ConfigError(f"{spec!r} is not a vocabulary size", where="tokenizer", hint=hint, got=spec)
    return int(digits)


def _byte_level(model: Any, *, use_regex: bool) -> Any:
    rust: Any = RustTokenizer(model)
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    rust.decoder = decoders.ByteLevel()
    return rust


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte: itself where visible, else one from U+0100 on (GPT-2)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def _num_bytes_of_piece(token: str) -> int:
    """Bytes of a SentencePiece-style piece: <0xNN> is one byte, the lower one eighth block stands for a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode())


def _batched(texts: Iterable[str], *, batch_size: int = 256) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch:
        yield batch
