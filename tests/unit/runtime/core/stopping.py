"""Random runs of a worker's session and the engine core's part, without an engine: requests with
probes that stop them or switch their edits, in chunks, with drafts, with steps that are scheduled
ahead, and preempted.
"""

import pickle
import random
from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.conditions import first_met
from support.fake_steps import TAPS, WIDTH, FakeEngine, applies, covers, view_of
from support.plans import Vector
from support.score_rules import scores_by_definition

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Instruction,
    Match,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
    Stop,
    Switch,
    Where,
)
from midstream.plan.resolve.wire import to_bytes
from midstream.plan.scores.rule import PLAIN, ScoreRule
from midstream.runtime.core.probe_stops import update_from_output
from midstream.runtime.protocol.acting_probes import acting_probes
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.plan_version import PlanChange, PlanVersion
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import ChangePlans, read_request
from midstream.runtime.protocol.segments import APPLIED_0, UNSEEN
from midstream.runtime.vllm.attributes import EXECUTOR, STEP_SCORES

TAP = ("resid_post", 1)
WORDS = 6  # tokens


def score(token: int, position: int, slot: int) -> float:
    """What a probe reads, in eighths."""
    mixed = (token * 7919 + position * 104729 + slot * 1299709 + 17) * 2654435761 % 2**32
    return ((mixed >> 9) % 33 - 16) / 8


# What is over all tokens so far, and several classes.
RULES = (
    ScoreRule(2, "softmax"),
    ScoreRule(2, "softmax", 3, pool="max"),
    ScoreRule(2, "max", bias=0.5),
    ScoreRule(2, link="softmax", pool="ema:0.5"),
    ScoreRule(pool="mean:3"),
)


def _reads(slot: int, is_last: bool) -> Instruction:
    read = Vector.parse([float(place == slot) for place in range(WIDTH)])
    flags = Flags.FRESH | (Flags.COUNTED if is_last else Flags.NONE)
    return Instruction(Op.PROBE, read=read, flags=flags, slot=slot)


@dataclass(eq=False)
class Asked:
    """A request: vLLM's Request, as far as midstream looks at it, and the runner's view of it.

    Attributes:
        tokens: what the runner has, prompt first: those of steps in flight too.
        computed: its tokens before the next step.
        shown: the tokens that left in outputs.
        reason: the stop reason of its last output.
        reached: number of its positions that steps were scheduled with.
        begun: first position of the last step that arrived.
        changes: each change of its plan.
    """

    request_id: str
    prompt: list[int]
    plan: ResolvedPlan
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    shown: list[int] = field(default_factory=list)
    reason: str | None = None
    status: str = ""
    client_index: int = 0
    reached: int = 0
    begun: int = 0
    changes: list[PlanChange] = field(default_factory=list)
    num_preemptions: int = 0
    block_hashes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        switches = [one for one in self.plan.probes if isinstance(one.act, Switch)]
        versions = {one.name: self._version(nth) for nth, one in enumerate(switches, 1)}
        self.all_token_ids = list(self.prompt)
        self.tokens = list(self.prompt)
        payload = RequestPayload(
            self.request_id, to_bytes(self.plan), cache_keys(self.plan),
            acts=acting_probes(self.plan, versions),
        )  # fmt: skip
        self.sampling_params = SimpleNamespace(extra_args={"midstream": payload})

    def _version(self, number: int) -> PlanVersion:
        """The plan with so many edits of each token, which add nothing and are counted."""
        zeros = Vector.parse([0.0] * WIDTH)
        step = Instruction(Op.ADD, write=(zeros,), a=1.0, flags=Flags.COUNTED)
        edit = ResolvedEdit(*TAP, Steps((step,) * number), Where(((0, None),)))
        plan = replace(self.plan, edits=(edit,))
        return PlanVersion(number, to_bytes(plan), cache_keys(plan))

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def num_in_flight_tokens(self) -> int:
        return len(self.tokens) - self.num_tokens

    def update_block_hashes(self) -> None:
        return None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return bool(self.status)

    def get_finished_reason(self) -> Any:
        from vllm.v1.engine import FinishReason

        return FinishReason.STOP

    def take_events(self) -> None:
        return None

    def take_prefill_stats(self) -> None:
        return None


@dataclass
class Step:
    """A step in flight: of each request the number of its tokens, and what was sampled."""

    scheduled: dict[str, int]
    starts: dict[str, int]
    sampled: dict[str, list[int]]
    output: Any
    dropped: set[str] = field(default_factory=set)


class StoppingRun:
    """One run, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.ahead = draw.choice([0, 0, 1, 2])
        self.drafts = 0 if self.ahead else draw.choice([0, 1, 3])
        self.engine = FakeEngine(lag=draw.choice([None, 0, 1, 3]))
        self.requests = {f"r{nth}": self._request(f"r{nth}") for nth in range(draw.randint(1, 4))}
        self.every = dict(self.requests)
        self.flight: deque[Step] = deque()
        self.waits: set[str] = set()  # preempted, until all of their steps have arrived
        self.hash_block_size = 4
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        EXECUTOR.set(self, self)
        for one in self.every.values():
            self._enter(one)

    def collective_rpc(self, _method: object, args: Any, non_block: bool) -> None:
        """The executor: workers learn of other versions."""
        message = read_request(args[0])
        assert isinstance(message, ChangePlans)
        assert non_block
        for change in message.changes:
            one = self.every[change.request_id]
            assert change.position >= one.reached
            assert change.position == one.reached or one.num_preemptions
            one.changes.append(change)
        self.engine.session.requests.change(message.changes)

    def _enter(self, one: Asked) -> None:
        plan = one.sampling_params.extra_args["midstream"].plan
        self.engine.session.requests.add(one.request_id, one.request_id, plan, reports=True)

    def _request(self, name: str) -> Asked:
        draw = self.draw
        size = draw.randint(3, 20)
        probes: list[ResolvedProbe] = []
        for _ in range(draw.randint(1, 3)):
            rule = draw.choice([PLAIN, PLAIN, *RULES])
            first = probes[-1].slot + 1 if probes else 0
            slots = range(first, first + rule.columns)
            if slots.stop > WIDTH:
                break
            steps = Steps(tuple(_reads(slot, slot == slots[-1]) for slot in slots))
            where = draw.choice([
                Where(((0, None),)), Where(((size, None),)), Where(((0, size),)),
                Where(((1, 3), (size + 1, size + 9))),
                Where(((0, 1),), (Match(((size, None),), (1, 4), draw.random() < 0.5),)),
            ])  # fmt: skip
            fields: dict[str, Any] = dict(
                **{draw.choice(["above", "below"]): draw.randint(-10, 10) / 4 + 1 / 1024},
                for_=draw.choice([1, 1, 2, 3]),
                pool=draw.choice(["none", "none", "max", "mean:3", "ema:0.5"]),
            )
            if rule.outputs:
                fields["output"] = draw.randrange(rule.outputs)
            act = Switch([], **fields) if draw.random() < 0.5 else Stop(**fields)
            probe = ResolvedProbe(f"p{first}", *TAP, steps, where, act=act, rule=rule)
            probes.append(probe)
        prompt = draw.choices(range(WORDS), k=size)
        return Asked(name, prompt, ResolvedPlan(size, (), (), tuple(probes)), draw.randint(1, 16))

    # -- vLLM's scheduler ------------------------------------------------------------------------

    def finish_requests(self, names: list[str], status: Any) -> list[Asked]:
        assert status.name == "FINISHED_STOPPED"
        return [self._end(name) for name in names if name in self.requests]

    def _end(self, name: str) -> Asked:
        one = self.requests.pop(name)
        one.status = "finished"
        return one

    def _take(self, _scheduler: Any, step: Step, output: Any) -> dict[int, Any]:
        """vLLM's `update_from_output`: what was sampled joins the requests, and leaves."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        found: dict[int, Any] = {}
        for name in step.scheduled:
            one = self.requests.get(name)
            if one is None or name in step.dropped:
                continue
            new = output.sampled_token_ids[output.req_id_to_index[name]]
            new = new[: len(one.prompt) + one.max_tokens - one.num_tokens]
            one.all_token_ids += new
            if new:
                mine = found.setdefault(0, EngineCoreOutputs())
                mine.outputs.append(EngineCoreOutput(request_id=name, new_token_ids=new))
            if one.num_tokens == len(one.prompt) + one.max_tokens:
                self._end(name)
                one.reason = "length"
        return found

    # -- steps -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all requests have ended."""
        for _ in range(400):
            if not self.requests:
                return
            if self.draw.random() < 0.06:
                self._preempt(self.draw.choice(list(self.requests.values())))
            self._schedule()
            while len(self.flight) > self.ahead:
                self._arrive()
            if not self.flight or self.draw.random() < 0.1:
                while self.flight:
                    self._arrive()
        raise AssertionError("the run does not end")

    def _preempt(self, one: Asked) -> None:
        name, drops = one.request_id, self.draw.random() < 0.5
        mine = [step for step in self.flight if name in step.scheduled]
        if drops:
            # What these sampled never was; other tokens are sampled in its place.
            for step in mine:
                step.dropped.add(name)
            one.tokens = list(one.all_token_ids)
            if mine:
                one.reached = min(one.reached, one.num_tokens - 1)
        elif mine:
            self.waits.add(name)
        one.computed = 0
        one.num_preemptions += 1
        if self.draw.random() < 0.5:
            self._enter(one)  # V2 announces a resumed request as a new one

    def _schedule(self) -> None:
        scheduled, computed, drafted, sampled, rows = {}, [], {}, {}, []
        for name, one in self.requests.items():
            known = len(one.tokens)
            limit = len(one.prompt) + one.max_tokens
            if name in self.waits or one.computed >= min(known, limit):
                continue
            if self.draw.random() < 0.2:
                continue
            count = min(known - one.computed, self.draw.choice([1, 3, 16]))
            drafts: list[int] = []
            if one.computed + count == known:
                drafts = self.draw.choices(range(WORDS), k=self.draw.randint(0, self.drafts))
            rows += zip([*one.tokens[one.computed :][:count], *drafts],
                        range(one.computed, one.computed + count + len(drafts)),
                        strict=False)  # fmt: skip
            scheduled[name], drafted[name] = count + len(drafts), drafts
            computed.append(one.computed)
            sampled[name] = []
            one.computed += count
            if one.computed == known:
                accepted = self.draw.randint(0, len(drafts))
                sampled[name] = [*drafts[:accepted], self.draw.randrange(WORDS)]
                one.tokens += sampled[name]
                one.computed += accepted
            one.reached = max(one.reached, one.computed)
        if scheduled:
            output = SimpleNamespace(
                sampled_token_ids=list(sampled.values()),
                req_id_to_index={name: nth for nth, name in enumerate(sampled)},
                prompt_logprobs_dict={},
            )
            self._compute(scheduled, computed, rows, output)
            starts = dict(zip(scheduled, computed, strict=True))
            self.flight.append(Step(scheduled, starts, sampled, output))

    def _compute(
        self, scheduled: dict[str, int], computed: list[int], rows: Any, output: Any
    ) -> None:
        session, index = self.engine.session, TAPS[TAP]
        view = view_of(list(scheduled), list(scheduled.values()), computed)
        session.before_forward(view)
        hidden = torch.tensor(
            [[score(token, place, slot) for slot in range(WIDTH)] for token, place in rows]
        )
        if bool(self.engine.buffers.tokens[:, layout.PROGRAM].any()):
            for tap, nth in TAPS.items():
                given = hidden.clone() if tap == TAP else torch.zeros_like(hidden)
                other = torch.zeros_like(hidden) if nth % 2 else None
                self.engine._fire(nth, given, other)
        assert index in TAPS.values()
        session.after_forward()
        found = session.reported_scores
        session.clear_reported_scores()
        if found is not None:
            STEP_SCORES.set(output, found)

    def _arrive(self) -> None:
        step = self.flight.popleft()
        scores = STEP_SCORES.get(step.output)
        if scores is not None and self.draw.random() < 0.5:
            # As from a process of its own.
            STEP_SCORES.set(step.output, pickle.loads(pickle.dumps(scores)))
        sampled = [list(one) for one in step.output.sampled_token_ids]
        before = step.output.sampled_token_ids
        for name in step.starts.keys() & self.requests.keys() - step.dropped:
            self.every[name].begun = step.starts[name]
        found = update_from_output(self._take, self, step, step.output)
        assert before == sampled, "the runner's own lists were changed"
        for outputs in found.values():
            for one in outputs.outputs:
                asked = self.every[one.request_id]
                assert asked.reason in (None, "length")
                asked.shown += one.new_token_ids
                asked.reason = one.stop_reason or asked.reason
        for name in list(self.waits):
            if not any(name in each.scheduled for each in self.flight):
                self.waits.discard(name)
        for name in [name for name in self.every if name not in self.requests]:
            self.engine.session.requests.finish([name])

    # -- what must be so -------------------------------------------------------------------------

    def check(self) -> tuple[int, int]:
        """Check each request's end, and the versions of its plan, against the definition of its
        conditions, on the tokens that were shown; return how many a probe ended, and how many
        switches there were.
        """
        ended = 0
        for one in self.every.values():
            tokens = [*one.prompt, *one.shown]
            self._check_versions(one, tokens)
            met = {
                probe.name: place
                for probe in one.plan.probes
                if isinstance(probe.act, Stop) and (place := self._met(probe, tokens)) is not None
            }
            first = min(met.values(), default=None)
            if one.reason == "length":
                # The last token was never computed on, or is a draft that was not waited for.
                assert first is None or first == len(tokens) - 1
                assert len(one.shown) == one.max_tokens
                continue
            ended += 1
            assert first is not None
            assert one.reason == f"probe:{min(met, key=lambda name: (met[name], name))}"
            assert len(one.shown) == max(0, first + 1 - len(one.prompt))
        return ended, sum(len(one.changes) for one in self.every.values())

    def _check_versions(self, one: Asked, tokens: list[int]) -> None:
        """A probe switches once, after the token that met its condition, unless that step was the
        request's last; and each position was computed under the version that held there.
        """
        switches = [probe for probe in one.plan.probes if isinstance(probe.act, Switch)]
        changes = {change.number: change for change in one.changes}
        assert len(changes) == len(one.changes)
        for number, probe in enumerate(switches, 1):
            place, change = self._met(probe, tokens), changes.get(number)
            if change is not None:
                assert place is not None
                assert place < change.position
            elif place is not None:
                assert place >= one.begun
        (state,) = self.engine.take(one.request_id)
        length = min(len(tokens) - 1, len(state.done))
        for position in range(length):
            if state.done[position] == UNSEEN:
                continue
            version = 0
            for change in one.changes:
                version = change.number if change.position <= position else version
            probes = sum(covers(probe.where.possible, position) for probe in one.plan.probes)
            assert state.done[position] == APPLIED_0 + version + probes, (one.request_id, position)

    def _met(self, probe: ResolvedProbe, tokens: list[int]) -> int | None:
        places = [place for place, token in enumerate(tokens) if applies(probe.where, place, token)]
        numbers = [[score(tokens[place], place, s) for s in probe.slots] for place in places]
        scores = scores_by_definition(probe.rule, numbers).astype(np.float32)
        scores = scores if probe.act.output is None else scores[:, probe.act.output]
        fields = {"above": probe.act.above, "below": probe.act.below}
        nth = first_met(scores.tolist(), **fields, for_=probe.act.for_, pool=probe.act.pool)
        return None if nth is None else places[nth]
