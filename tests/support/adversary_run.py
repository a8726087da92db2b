"""Runs of requests on one engine, by its step loop or one by one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.adversary_mix import Ask, Past
from support.engine_view import inspect
from support.engines import tokens

Coming = Callable[[int, Sequence[Past], int], list[Ask]]


@dataclass
class Ran:
    """Results of a mix."""

    # The requests that came, in the order in which they did.
    asks: list[Ask] = field(default_factory=list)
    # vLLM's final output by number; none of those that were given up.
    outputs: dict[int, Any] = field(default_factory=dict)
    # Numbers of requests that were aborted while they ran or waited.
    given_up: set[int] = field(default_factory=set)
    preemptions: int = 0  # how often the scheduler took a running request off
    ticks: int = 0  # turns of the loop


class Driver:
    """One engine and its server-wide edits and vectors. The engine must have no other requests."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._server: dict[str, Any] = {}
        self._names: dict[str, list[float]] = {}

    def run(self, coming: Coming, count: int) -> Ran:
        """Runs requests as they come until all `count` have ended."""
        engine = self.llm.llm_engine
        assert self.llm.reset_prefix_cache()
        before = counter(self.llm, "vllm:num_preemptions")
        ran, past, open_ = Ran(), [], {}
        while len(ran.asks) < count or engine.has_unfinished_requests():
            for ask in coming(ran.ticks, past, len(open_)):
                self._add(ask)
                ran.asks.append(ask)
                open_[ask.name] = ask
            late = [ask for ask in open_.values() if (ask.abort_at or ran.ticks + 1) <= ran.ticks]
            for ask in late:
                engine.abort_request([ask.name])
                ran.given_up.add(ask.number)
                del open_[ask.name]
            for output in engine.step() if engine.has_unfinished_requests() else ():
                ask = open_.pop(output.request_id, None)
                assert ask is not None, f"{output.request_id} came though it had ended"
                assert output.finished
                assert ask.number not in ran.outputs
                ran.outputs[ask.number] = output
                past.append(Past(ask.prompt, list(output.outputs[0].token_ids)))
            ran.ticks += 1
        assert not open_, f"{sorted(open_)} never ended"
        self._in_force({}, {})
        ran.preemptions = int(counter(self.llm, "vllm:num_preemptions") - before)
        return ran

    def again(self, asks: Sequence[Ask]) -> Ran:
        """The same requests, or some of them, at the same ticks."""
        left = sorted(asks, key=lambda ask: (ask.at, ask.number))

        def coming(tick: int, _past: Sequence[Past], open_: int) -> list[Ask]:
            # What was left out may have been all that ran for a while.
            due = [ask for ask in left if ask.at <= tick] or ([] if open_ else left[:1])
            del left[: len(due)]
            return due

        return self.run(coming, len(left))

    def _add(self, ask: Ask) -> None:
        self._in_force(ask.server, ask.names)
        self.llm.llm_engine.add_request(ask.name, tokens(ask.prompt), params_of(ask, ask.plan))

    def _in_force(self, server: dict[str, Any], names: dict[str, list[float]]) -> None:
        if server != self._server:
            self.llm.steering.clear()
            if server:
                self.llm.steering.set(**server)
            self._server = server
        for name, value in names.items():
            if self._names.get(name) != value:
                self.llm.vectors.register(name, value)
        self._names = {**self._names, **names}


def alone(llm: Any, ask: Ask) -> Any:
    """The output of one request on an idle engine, all that it asks for by value."""
    output = llm.generate(tokens(ask.prompt), params_of(ask, ask.alone), use_tqdm=False)[0]
    assert_idle_and_clean(llm)
    return output


def params_of(ask: Ask, plan: dict[str, Any] | None) -> Any:
    """SamplingParams whose output comes once, when the request has ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra = None if plan is None else {"midstream": plan}
    return SamplingParams(**ask.params, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra)


def assert_idle_and_clean(llm: Any) -> None:
    """Nothing runs, and nothing of any request is left."""
    assert not inspect(llm).leftovers()


def counter(llm: Any, name: str) -> float:
    """One of vLLM's own counters; the engine must have been made with its statistics on."""
    found = [metric.value for metric in llm.get_metrics() if metric.name == name]
    assert found, f"there is no counter {name}: make the engine with disable_log_stats=False"
    return float(sum(found))


@contextmanager
def rewinding() -> Iterator[None]:
    """Lets vLLM's CPU runner sample with a seed beside prompts in chunks.

    It draws for a chunk as well and then puts the generator back by an offset, which torch's CPU
    generators do not have. Here that is done by drawing anew from the seed.
    """
    import torch
    from vllm.v1.worker import gpu_model_runner

    class Rewinding(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            assert offset == -4
            anew = torch.Generator().manual_seed(self.initial_seed())
            wanted = self.get_state()
            for _ in range(10_000):
                before = anew.get_state()
                torch.randint(0, 2**31, (1,), generator=anew, dtype=torch.long)
                if torch.equal(anew.get_state(), wanted):
                    self.set_state(before)
                    return
            raise AssertionError("the generator was not drawn from as expected")

    original = gpu_model_runner.CachedRequestState

    def make(*args: Any, **fields: Any) -> Any:
        generator = fields.get("generator")
        if generator is not None and generator.device.type == "cpu":
            own = Rewinding()
            own.manual_seed(generator.initial_seed())
            fields["generator"] = own
        return original(*args, **fields)

    gpu_model_runner.CachedRequestState = make
    try:
        yield
    finally:
        gpu_model_runner.CachedRequestState = original
