"""Requests that the front end asks the engine core to stop."""

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from midstream.config.config import KEY
from midstream.runtime.core.ended_requests import update_from_output
from midstream.runtime.core.plan_versions import answer_rpc
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import RPC, StopRequests

KEYS = CacheKeys((0,), ("",), None)


def request(name: str, uid: str) -> Any:
    payload = RequestPayload(uid, b"plan", KEYS)
    return SimpleNamespace(
        request_id=name,
        client_index=0,
        sampling_params=SamplingParams(extra_args={KEY: payload}),
        get_finished_reason=lambda: FinishReason.STOP,
        take_events=list,
        take_prefill_stats=lambda: None,
    )


class Scheduler:
    """vLLM's, with requests that run."""

    def __init__(self, *requests: Any) -> None:
        self.requests = {one.request_id: one for one in requests}

    def finish_requests(self, names: list[str], status: Any) -> list[Any]:
        assert status == RequestStatus.FINISHED_STOPPED
        return [self.requests.pop(name) for name in names if name in self.requests]

    def step(self, *ended: str) -> list[tuple[str, list[int], Any]]:
        """The outputs of a step that gives each request a token, and ends some."""

        def original(_self: Any, _scheduled: Any, _output: Any) -> Any:
            found = EngineCoreOutputs()
            found.outputs = [EngineCoreOutput(name, [7]) for name in self.requests]
            for name in ended:
                self.requests.pop(name)
            return {0: found}

        outputs = update_from_output(original, self, None, None)[0].outputs
        return [(one.request_id, one.new_token_ids, one.stop_reason) for one in outputs]


def ask(scheduler: Scheduler, uid: str, *names: str) -> None:
    message = pack(StopRequests(uid, list(names), f"controller:{uid}"))
    answer = answer_rpc(SimpleNamespace(scheduler=scheduler), RPC, [message])
    assert answer is not None
    assert len(answer) == 1


def test_they_end_with_the_tokens_of_the_next_step_and_no_others_do():
    scheduler = Scheduler(request("a", "u"), request("b", "u"), request("c", "v"))
    ask(scheduler, "u", "a", "gone")
    ask(scheduler, "v", "c")
    assert scheduler.step() == [
        ("a", [7], None), ("b", [7], None), ("c", [7], None),
        ("a", [], "controller:u"), ("c", [], "controller:v"),
    ]  # fmt: skip
    assert scheduler.step() == [("b", [7], None)]


def test_one_that_ends_by_itself_before_ends_once_and_another_of_its_id_goes_on():
    scheduler = Scheduler(request("a", "u"), request("b", "u"))
    ask(scheduler, "u", "a")
    assert scheduler.step("a") == [("a", [7], None), ("b", [7], None)]
    scheduler.requests["a"] = request("a", "later")
    ask(scheduler, "u", "a")
    assert scheduler.step() == [("b", [7], None), ("a", [7], None)]
