"""What packs of documents must be, from their definition: a stream of tokens that is cut."""

from typing import Any, NamedTuple

import numpy as np
from lab.jobs.fakes import LAYERS, vector
from tokenizers.pre_tokenizers import ByteLevel

from midstream import open_store
from midstream.lab.jobs import PromptParts
from midstream.store import verify

_IDS = {char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}
START, END = 265, 266  # of a message


def ids_of(text: str) -> list[int]:
    """The ids of ASCII in `byte_level`, which spells what is no letter by other characters."""
    return [_IDS[{"\n": "\u010a", " ": "\u0120"}.get(char, char)] for char in text]


def document(line: int, text: str) -> list["Token"]:
    return [Token(id, line, offset) for offset, id in enumerate(ids_of(text))]


class Token(NamedTuple):
    """A token of the stream; of a separator the line is 0."""

    id: int
    line: int
    offset: int
    is_assistant: bool = False


def stream(documents: list[list[Token]], separator: int, length: int) -> list[list[Token]]:
    """All documents with separators between, cut every `length` tokens."""
    tokens: list[Token] = []
    for document in documents:
        tokens += [Token(separator, 0, 0)] * bool(tokens) + document
    return [tokens[at : at + length] for at in range(0, len(tokens), length)]


def chat_tokens(line: int, talk: list[dict[str, str]]) -> list[Token]:
    """A conversation in ChatML with a token per character."""
    tokens: list[Token] = []

    def put(ids: list[int], is_assistant: bool = False) -> None:
        first = len(tokens)
        tokens.extend(Token(id, line, first + n, is_assistant) for n, id in enumerate(ids))

    for message in talk:
        put([START, *ids_of(message["role"] + "\n")])
        put(ids_of(message["content"]), message["role"] == "assistant")
        put([END, *ids_of("\n")])
    return tokens


def check_packed(root: Any, packs: list[list[Token]], whole: bool, without_first: bool) -> int:
    """Whether the store has each token of these packs once, with its document and its mask; if
    not `whole`, of the packs that are there. Returns the number of rows.
    """
    assert verify(root).ok
    requests = open_store(root).requests
    numbers = [request.metadata["line"] for request in requests]
    assert len(set(numbers)) == len(numbers)
    assert not whole or sorted(numbers) == list(range(1, len(packs) + 1))
    rows = 0
    seen: set[tuple[int, int]] = set()
    for request in requests:
        pack = packs[request.metadata["line"] - 1]
        parts = PromptParts.read(request.metadata)
        activations = request.activations()
        positions = activations.positions.tolist()
        wanted = [
            place
            for place, token in enumerate(pack)
            if token.line and not (without_first and (place == 0 or token.offset == 0))
        ]
        assert positions == wanted
        assert activations.token_ids.tolist() == [pack[place].id for place in wanted]
        for layer in LAYERS:
            expected = [vector(pack[place].id, place, layer).tolist() for place in wanted]
            assert activations["resid_post", layer].tolist() == expected
        lines, offsets = parts.origin(positions)
        origins = list(zip(lines.tolist(), offsets.tolist(), strict=True))
        assert origins == [(pack[place].line, pack[place].offset) for place in wanted]
        if parts.roles is not None:
            mask = parts.loss_mask(np.arange(len(pack)))
            assert mask.tolist() == [token.is_assistant for token in pack]
        assert not seen & set(origins)
        seen |= set(origins)
        rows += len(positions)
    return rows
