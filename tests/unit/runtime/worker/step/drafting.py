"""Steps with drafted tokens, some of them rejected, and checks of the accepted ones.

The truth is noted from accepted rows alone. What the host is told may be exact, or as with
asynchronous scheduling: as if all of the last step's drafts had been accepted.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.fake_steps import VOCABULARY, Fake, FakeEngine, captured, scored
from support.stored import worker_info

from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.rpc import ReadScores, read_answers, read_request
from midstream.runtime.protocol.scores import score_blocks
from midstream.runtime.protocol.segments import CACHED, UNSEEN
from midstream.runtime.worker.endpoint import pack_scores
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions

WORKER = worker_info()


@dataclass
class Drafted(Fake):
    """A request whose next tokens are guessed.

    Attributes:
        ahead: by how much the host's count is too high.
        slack: by how much the host knows that it may be.
        true_rows, true_scores, true_done: of accepted rows only.
    """

    ahead: int = 0
    slack: int = 0
    true_rows: dict[Any, Any] = field(default_factory=dict)
    true_scores: dict[int, Any] = field(default_factory=dict)
    true_done: dict[int, int] = field(default_factory=dict)

    def guess(self, draw: random.Random, count: int, right: int) -> dict[int, int]:
        """Drafts for the positions after the next, of which the first `right` are right."""
        found = {}
        for nth in range(count):
            position = self.computed + 1 + nth
            token = self.tokens[position]
            if nth == right:
                token = (token + draw.randint(1, VOCABULARY - 1)) % VOCABULARY
            elif nth > right:
                token = draw.randrange(VOCABULARY)
            found[position] = token
        return found

    def accept(self, first: int, stop: int) -> None:
        """Takes the step's rows of these positions, as they were noted last, for true."""
        for position in range(first, stop):
            self.true_done[position] = self.done[position]
            if position in self.scored:
                self.true_scores[position] = {
                    slot: score for (slot, at), score in self.scores.items() if at == position
                }
        for (tap, position), row in self.rows.items():
            if first <= position < stop:
                self.true_rows[tap, position] = row


class DraftingEngine(FakeEngine):
    """A `FakeEngine` in which steps guess ahead.

    Attributes:
        late: whether the host learns only a step later what was accepted.
    """

    def __init__(self, *args: Any, late: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.late = late
        # One buffer for all steps, as vLLM's.
        self.positions = torch.zeros(64, dtype=torch.int64)

    def view(self, batch: list[tuple[Fake, int]]) -> StepBatch:
        exact = super().view(batch)
        if not self.late:
            return exact
        places = [np.arange(fake.computed, fake.computed + count) for fake, count in batch]
        self.positions.fill_(-7)
        self.positions[: exact.num_tokens] = torch.from_numpy(np.concatenate(places))
        slack = np.array([fake.slack for fake, _ in batch], np.int64)
        return exact._replace(
            computed=np.array([fake.computed + fake.ahead for fake, _ in batch], np.int32),
            unknown=UnknownPositions(lambda: slack, lambda: self.positions[: exact.num_tokens])
            if slack.any()
            else None,
        )

    def draft(
        self, batch: Iterable[tuple[Drafted, int, int]], draw: random.Random, spare: int = 0
    ) -> None:
        """A step of (request, how many tokens are drafted, how many of them are right)."""
        batch = list(batch)
        truth = [list(fake.tokens) for fake, _, _ in batch]
        firsts = [fake.computed for fake, _, _ in batch]
        for fake, count, right in batch:
            for position, token in fake.guess(draw, count, right).items():
                fake.tokens[position] = token
        self.step([(fake, count + 1) for fake, count, _ in batch])
        for (fake, count, right), tokens, first in zip(batch, truth, firsts, strict=True):
            fake.tokens = tokens
            right = min(count, right)
            fake.computed = first + 1 + right
            fake.ahead, fake.slack = count - right, count + (spare if count else 0)
            fake.accept(first, fake.computed)

    def plainly(self, batch: list[tuple[Drafted, int]]) -> None:
        """A step of (request, tokens scheduled) that guesses nothing."""
        firsts = [fake.computed for fake, _ in batch]
        self.step(list(batch))
        for (fake, _), first in zip(batch, firsts, strict=True):
            fake.ahead = fake.slack = 0
            fake.accept(first, fake.computed)

    def peeked(self, fake: Drafted, start: int) -> dict[int, Any]:
        """Return the scores of a running request, from a position to the last certain one."""
        uid = fake.uid or fake.id
        request = read_request(pack(ReadScores({uid: (start, fake.computed)})))
        scores = self.session.collection.read_scores(request.spans).values()
        (told,) = read_answers(request, [pack(pack_scores(scores))])
        return {
            position: record
            for _, block in score_blocks(WORKER, told.requests, told.data)
            for position, record in zip(block.positions.tolist(), block.values, strict=True)
        }


def check_scores(found: dict[int, Any], fake: Drafted, start: int = 0) -> None:
    """Scores are those of accepted rows, one for each position."""
    wanted = {p: scores for p, scores in fake.true_scores.items() if start <= p < fake.computed}
    assert set(found) == set(wanted)
    for position, scores in wanted.items():
        for slot, score in scores.items():
            assert found[position][slot] == score, f"{fake.id}: slot {slot} at {position}"


def check_true(request: RequestState, fake: Drafted) -> None:
    """Up to its final length a request has the rows, scores and states of accepted rows, each
    once. What is beyond is for the front end to drop.
    """
    length = fake.computed if fake.true_done else 0  # one that ended before it ran has no states
    assert request.problem == ""
    rows = {key: row for key, row in captured(request).items() if key[1] < length}
    assert set(rows) == {key for key in fake.true_rows if key[1] < length}
    for key, row in rows.items():
        assert (row == fake.true_rows[key]).all(), f"{fake.id}: {key}"
    found = {position: row for position, row in scored(request).items() if position < length}
    check_scores(found, fake)
    skipped = set(range(length)) - set(fake.true_done)
    states = request.done[:length].tolist()
    assert [states[position] for position in sorted(skipped)] == [CACHED] * len(skipped)
    for position, state in fake.true_done.items():
        assert position >= length or states[position] == state, f"{fake.id} at {position}"
    assert (request.done[len(fake.done) :] == UNSEEN).all()
