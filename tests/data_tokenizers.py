"""Small tokenizers for the tests of data: no download, known ids."""

from __future__ import annotations

from typing import Any


def byte_tokenizer(special: tuple[str, ...] = (), **names: Any) -> Any:
    """Bytes 0 to 255 as tokens (ids in the order of GPT-2's byte alphabet), and then bos, eos, pad and `special`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **{name: token for name, token in names.items() if token})
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def word_tokenizer(words: str, *, metaspace: bool = False, special: tuple[str, ...] = (), **names: Any) -> Any:
    """Whole words as tokens, numbered in the order given; `metaspace` glues a blank to each, and puts one before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate([*words.split(), "<unk>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **{name: token for name, token in names.items() if token})
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer
