"""Tokenizers created in the test, without a download."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_WORDS = ["▁the", "▁cat", "▁con", "cat", "▁a", "the"]


def byte_pairs(specials: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    """In the manner of GPT-2: a token per byte, a few of more, and special ones, some of which the
    tokenizer has by name.
    """
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n"), ("i", "n")]
    words += [first + second for first, second in pairs]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    kept = dict.fromkeys([*words[:4], *specials, *named.values()])
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in kept])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=named,
    )


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: spaces are ▁, one is put first, unknown characters are bytes."""
    core = _of_words()
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_chat(core)


def metaspace(scheme: str, joined: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """In the manner of newer SentencePiece models, with the same words."""
    core = _of_words()
    if joined is not None:
        core.normalizer = normalizers.Replace(*joined)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _with_chat(core)


def _of_words() -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    merges: list[tuple[str, str]] = []
    for char in ["▁", *"abcdefghijklmnopqrstuvwxyz.,<>|_\n"]:
        vocab.setdefault(char, len(vocab))
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )


def byte_level() -> PreTrainedTokenizerFast:
    """In the manner of GPT-2, with a token per byte and a few that cut characters in odd places."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {char: nth for nth, char in enumerate(sorted(alphabet))}
    # "😀" is F0 9F 98 80. A space with its first bytes, and its last one with the next one's first.
    spelt = {byte: char for char, byte in _bytes_of_chars().items()}
    pieces = [b"a\xf0", b" \xf0\x9f", b"\x80\xf0", b"\xf0\x9f", b"he", b"\n\n", b"  "]
    merges = []
    for piece in pieces:
        chars = [spelt[byte] for byte in piece]
        for end in range(2, len(chars) + 1):
            whole = "".join(chars[:end])
            if whole not in vocab:
                vocab[whole] = len(vocab)
                merges.append(("".join(chars[: end - 1]), chars[end - 1]))
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _with_chat(core)


def _bytes_of_chars() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return found | {chr(256 + nth): byte for nth, byte in enumerate(others)}


def _with_chat(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<s>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    tokenizer.chat_template = CHATML
    return tokenizer
