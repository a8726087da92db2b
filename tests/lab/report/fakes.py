"""An engine without a model, and a run's result without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from midstream.lab.fit import LayerScore
from midstream.lab.report.engine import EngineReply, Request
from midstream.lab.report.pairs import Pair
from midstream.lab.report.result import Answer, Question, RequestReceipt, Result, TokenMap

NUM_LAYERS, HIDDEN = 4, 24
GLAD = frozenset(["glad", "won", "saved", "laughed"])
SAD = frozenset(["sad", "lost", "died", "wept"])


class WordTokenizer:
    """One token a word; tokens are numbered as they come."""

    chat_template = "yes"

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        words = text.split()
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in words]}

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)

    def apply_chat_template(self, turns: list[dict[str, str]], **_: bool) -> str:
        return f"<user> {turns[0]['content']} <assistant>"


class FakeEngine:
    """Its stream has, at layer 2 only, the sum of the glad and sad words so far along `axis`."""

    layer = 2
    max_length = 64

    def __init__(self) -> None:
        self.tokenizer = WordTokenizer()
        self.batches: list[list[Request]] = []
        self.scored: list[tuple[list[int], list[int]]] = []
        self.axis = torch.nn.functional.normalize(
            torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)), dim=0
        )

    def run(self, requests: Sequence[Request]) -> list[EngineReply]:
        self.batches.append(list(requests))
        return [self._one(index, request) for index, request in enumerate(requests)]

    def score(self, texts: list[list[int]], prompts: list[list[int]]) -> list[float]:
        """−1 for each token of the prompt, and −0.01 for each of the text."""
        self.scored = list(zip(texts, prompts, strict=True))
        return [-len(b) - 0.01 * len(a) for a, b in self.scored]

    def _one(self, index: int, request: Request) -> EngineReply:
        text, generated = "", []
        if request.max_tokens > 1:
            push = request.push
            moved = float(push.vector @ self.axis) * push.scale if push else 0
            mood = "glad" if moved > 0.5 else "sad" if moved < -0.5 else "calm"
            text = f" I am {mood} <b>& so on</b>"
            generated = self.tokenizer(text)["input_ids"][: request.max_tokens]
        num_prompt = len(request.token_ids)
        tokens = request.token_ids + generated[:-1]  # the last one is never fed back
        chosen = {
            None: range(0),
            "prompt": range(num_prompt),
            "last_prompt": range(num_prompt - 1, num_prompt),
            "generated": range(num_prompt, len(tokens)),
        }[request.capture]
        rows = self._stream(index, tokens)[:, list(chosen)] if request.capture else None
        count = 0 if rows is None else rows.shape[1]
        asked = request.capture or request.push
        receipt = {
            "status": "ok",
            "prompt_tokens": num_prompt,
            "generated_tokens": len(generated) or 1,
            "captured": [
                {"site": "resid_post", "layer": layer, "expected": count, "actual": count}
                for layer in range(NUM_LAYERS)
                if request.capture
            ],
            "edited": None
            if request.push is None
            else {"expected": len(tokens), "applied": len(tokens), "tokens": 0},
            "problems": [],
        }
        kept = [tokens[at] for at in chosen]
        return EngineReply(text, rows, kept, generated, receipt if asked else None)

    def _stream(self, seed: int, tokens: list[int]) -> torch.Tensor:
        """`[layers, tokens, hidden]`"""
        noise = torch.Generator().manual_seed(seed)
        rows = torch.randn(NUM_LAYERS, len(tokens), HIDDEN, generator=noise)
        words = [self.tokenizer.words[token].strip(".") for token in tokens]
        mood = torch.tensor([float((w in GLAD) - (w in SAD)) for w in words]).cumsum(0)
        rows[self.layer] += 6 * mood[:, None] * self.axis
        return rows


@contextmanager
def no_stage(_words: str) -> Iterator[None]:
    """A stage that nobody watches."""
    yield


def make_result(hostile: str = "") -> Result:
    """A result whose every text carries `hostile`."""
    scores = tuple(
        LayerScore(0.5 + 0.1 * n, 0.5 + 0.08 * n, 0.7 * n, 0.02, 0.03, 0.1) for n in range(5)
    )
    cells = [[0.1 * layer - 0.05 * token for token in range(3)] for layer in range(5)]
    answers = [
        Answer(-2.0, f"a sad answer {hostile}", -0.5, -1.25, 0.5),
        Answer(0.0, f"a plain answer {hostile}", None),
        Answer(1.5, f"a glad answer {hostile}", 0.25, -2.5, 0.0),
    ]
    content = {
        "status": "ok",
        "prompt_tokens": 7,
        "generated_tokens": 3,
        "captured": [{"site": "resid_post", "layer": 0, "expected": 9, "actual": 9}],
        "edited": {"expected": 9, "applied": 9, "tokens": 9},
        "problems": [f"a remark {hostile}"] if hostile else [],
    }
    return Result(
        model=f"a-model{hostile}",
        versions={"vLLM": f"1.2.3{hostile}"},
        settings={"device": f"CPU{hostile}"},
        started="2030-01-01 00:00 UTC",
        seconds={"capture": 1.25},
        classes=("glad", "sad"),
        pairs=[Pair(f"won {hostile}", f"lost {hostile}"), Pair("glad", "sad")],
        num_folds=6,
        scores=scores,
        best_layer=4,
        layer=3,
        gap_norm=12.5,
        stream_norm=80.0,
        token_maps=[TokenMap(f"a map {hostile}", ["One", f"two{hostile}", "\n"], cells, cells)],
        questions=[Question(f"A question {hostile}?", answers), Question("Another?", answers)],
        receipts=[RequestReceipt(f"request one {hostile}", content)],
        source=f"models/a-model{hostile}",
        arguments={"dtype": "float32"},
        max_tokens=40,
        command=f"midstream report --model 'x{hostile}'",
        vectors=b"vectors",
        gguf=b"control vector",
    )
