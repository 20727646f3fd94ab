"""Toy tokenizers, and checkpoint folders around them: small enough to read, of every kind that checkpoints use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
UNKNOWN = "<unk>"


def _byte_chars() -> list[str]:
    """The character that stands for each of the 256 bytes in a byte-level vocabulary."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = iter(sorted(set(alphabet) - set(own)))
    back = {b: c for c, b in own.items()}
    return [back[b] if b in back else next(rest) for b in range(256)]


def byte_token(data: bytes) -> str:
    """The byte-level token of these bytes."""
    chars = _byte_chars()
    return "".join(chars[b] for b in data)


def byte_level(extra: tuple[bytes, ...] = ()) -> Tokenizer:
    """Byte-level BPE, as Qwen and SmolLM have: ids 0..255 are the bytes, then merges, *extra* tokens, added tokens."""
    vocab = {c: i for i, c in enumerate(_byte_chars())}
    merges = [
        ("1", "2"),
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        (byte_token(b" "), "a"),
        (byte_token(b"\xe4"), byte_token(b"\xb8")),
    ]
    for token in (*("".join(m) for m in merges), *(byte_token(e) for e in extra)):
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # One with characters outside of the byte alphabet, one that reads as an invalid byte, one that is not special.
    special = ["<|im_start|>", "<|im_end|>", "<\uff5cend\u2581of\uff5c>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("\u00e9", normalized=False)])
    return tokenizer


_WORDS = ("\u2581", "\u2581a", "a", "b", "\u2581hello", "he", "l", "o", "x", ".", "y", "\u2581\u2581", "\u00e9", "\n")


def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE with a prefix space and byte tokens, as Llama 2 has: <unk> <s> </s>, 256 bytes, pieces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for word in _WORDS:
        vocab.setdefault(word, len(vocab))
    merges = [("\u2581", "a"), ("\u2581", "\u2581")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with Metaspace before and after, as T5 has; no byte tokens."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((word, -float(i + 1)) for i, word in enumerate(_WORDS))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece, as BERT has: a word may continue the one before it, and punctuation closes up."""
    words = ["[UNK]", "[SEP]", "a", "b", "##b", "##s", ".", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def end_of_word() -> Tokenizer:
    """BPE whose tokens carry an end-of-word mark, as CLIP and old GPT have: the text of a token depends on the next."""
    words = ["<unk>", "a", "a</w>", "b", "b</w>", "ab</w>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def words() -> Tokenizer:
    """Whole words and no decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(("<unk>", "<s>", "a", "b", "c"))}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def folder_of(folder: Path, tokenizer: Tokenizer, template: str | None = None, **config: Any) -> Path:
    """*folder*, with the tokenizer's files in it; *config* are fields of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **config} | (
        {"chat_template": template} if template else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
    return folder
