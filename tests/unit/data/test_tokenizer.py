from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from surefoot.core.errors import ConfigError, DataError
from surefoot.data.tokenizer import EOS, Tokenizer, bpe_size, bytes_tokenizer, load_tokenizer, train_bpe

TEXTS = [f"def step_{number}(loss, naïve='größe {number}'):\n    return loss * {number}\n" for number in range(200)]
TRAIN_IN_A_PROCESS = "from surefoot.data.tokenizer import train_bpe; import sys; print(train_bpe([sys.argv[1]] * 9, vocab_size=300).sha256)"
any_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, vocab_size=320)


def test_the_same_texts_give_the_same_bytes(bpe: Tokenizer) -> None:
    assert train_bpe(TEXTS, vocab_size=320).json_bytes == bpe.json_bytes
    runs = {
        subprocess.run([sys.executable, "-c", TRAIN_IN_A_PROCESS, TEXTS[0] + TEXTS[1]], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_bytes_are_their_own_ids() -> None:
    tokenizer = bytes_tokenizer()
    text = "größe\n\x00😀"
    assert tokenizer.encode(text) == list(text.encode())
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.token_num_bytes.tolist() == [1] * 256 + [0]


@settings(max_examples=100, deadline=None)
@given(text=any_text)
def test_any_text_comes_back(bpe: Tokenizer, text: str) -> None:
    for tokenizer in (bpe, bytes_tokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert int(tokenizer.token_num_bytes[ids].sum()) == len(text.encode())


def test_the_name_of_eos_in_a_text_is_plain_characters(bpe: Tokenizer) -> None:
    text = f"a document about {EOS} in models"
    for tokenizer in (bpe, bytes_tokenizer()):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text


def test_eos_leaves_no_trace_in_text(bpe: Tokenizer) -> None:
    assert bpe.decode([*bpe.encode("one"), bpe.eos_id, *bpe.encode("two")]) == "onetwo"


def test_a_file_comes_back_as_it_was(bpe: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe.json_bytes)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.sha256, loaded.eos_id, loaded.vocab_size) == (bpe.sha256, bpe.eos_id, bpe.vocab_size)


def test_truncation_and_templates_of_a_foreign_file_have_no_say(bpe: Tokenizer) -> None:
    foreign = RustTokenizer.from_str(bpe.json_bytes.decode())
    foreign.enable_truncation(max_length=2)
    foreign.enable_padding(length=50)
    assert Tokenizer(foreign.to_str().encode()).encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer file"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(DataError, match="cannot read the tokenizer file"):
        load_tokenizer(tmp_path / "none.json")


def test_a_tokenizer_without_eos_is_refused() -> None:
    rust = RustTokenizer(
        models.BPE(vocab={character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    with pytest.raises(DataError, match="no token that ends a document"):
        Tokenizer(rust.to_str().encode())


def test_sizes_of_a_spec() -> None:
    assert bpe_size("bpe:8192") == 8192
    assert bpe_size("bytes") is None
    for wrong in ("bpe:", "bpe:x", "bpe:100", "bpe:-5"):
        with pytest.raises(ConfigError, match="not a vocabulary size"):
            bpe_size(wrong)
