"""Drafted tokens: a rejected row leaves no trace, an accepted one is there exactly once."""

import random

import pytest
from support.nightly import rounds
from support.plans import plan_of, random_plan, rows
from unit.runtime.worker.step.drafting import Drafted, DraftingEngine, check_scores, check_true

POST = ("resid_post", 1)


class Decoding:
    """Random batches of requests that guess ahead, are preempted, served from the cache, end."""

    def __init__(self, seed, late, lag=None):
        self.draw = random.Random(seed)
        self.engine = DraftingEngine(seed, lag=lag, late=late)
        self.running, self.prompts, self.lengths = [], {}, {}
        self.made = self.accepted = self.rejected = self.checked = self.peeks = 0

    def arrive(self):
        length = self.draw.randint(4, 45)
        start = self.draw.randrange(length)
        plan = random_plan(self.draw, length)
        if self.draw.random() < 0.3:  # by positions that only the device may know
            edits = [(POST, rows(12, start), ((start, start + 12),))]
            plan = plan_of(edits, [([POST], ((start, None),))], prompt_len=1 + start // 2)
        fake = Drafted(f"r{self.made}", plan)
        self.made += 1
        self.lengths[fake.id] = length
        self.prompts[fake.id] = plan.prompt_len if plan else self.draw.randint(1, length)
        self.running.append(fake)
        if self.draw.random() < 0.2:
            fake.computed = self.draw.randint(0, self.prompts[fake.id] - 1)
        self.engine.add(fake)

    def step(self):
        guessing, plain, room = [], [], 64
        for fake in self.draw.sample(self.running, len(self.running)):
            if self.draw.random() < 0.15 or room < 8:  # not in this step
                # Nothing is unknown any more when it is scheduled again.
                fake.ahead = fake.slack = 0
                continue
            if self.draw.random() < 0.03:  # preempted
                fake.computed = fake.ahead = fake.slack = 0
                self.engine.add(fake)
                continue
            left = self.lengths[fake.id] - fake.computed
            prompt_left = self.prompts[fake.id] - fake.computed
            if prompt_left > 0:
                count = min(prompt_left, self.draw.randint(1, 8))
                plain.append((fake, count))
                room -= count
                continue
            count = min(self.draw.choice([0, 1, 2, 3, 5]), left - 1)
            right = self.draw.randint(0, count)
            self.accepted += right
            self.rejected += count - right
            guessing.append((fake, count, right))
            room -= count + 1
        if guessing:
            self.engine.draft(guessing, self.draw, spare=self.draw.choice([0, 0, 4]))
        if plain:
            self.engine.plainly(plain)
        for fake in self.running:
            if fake.plan and fake.computed and self.draw.random() < 0.3:
                start = self.draw.randrange(fake.computed)
                if all(position in fake.true_done for position in range(start, fake.computed)):
                    check_scores(self.engine.peeked(fake, start), fake, start)
                    self.peeks += 1

    def depart(self):
        for fake in list(self.running):
            if fake.computed >= self.lengths[fake.id] or self.draw.random() < 0.01:
                self.running.remove(fake)
                self.engine.session.requests.finish([fake.id])
                taken = self.engine.take(fake.id)
                assert len(taken) == (fake.plan is not None)
                for request in taken:
                    check_true(request, fake)
                    self.checked += 1

    def run(self, steps):
        for _ in range(steps):
            while len(self.running) < 5 and self.draw.random() < 0.6:
                self.arrive()
            self.step()
            self.depart()


@pytest.mark.parametrize("seed", range(rounds(suite=1, nightly=8)))
def test_of_random_drafts_only_what_was_accepted_remains(seed):
    late, lag = bool(seed % 2), (None, 1, 0, 4)[seed % 4]
    run = Decoding(seed, late, lag)
    run.run(60)
    assert run.accepted > 30
    assert run.rejected > 30
    assert run.checked > 5
    assert run.peeks > 10
