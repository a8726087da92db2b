"""The way of a plan through the package: files, functions and calls of each stage, by a profiler.

python -m repo.request_path            prints the table
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

from support.fake_steps import Fake, FakeEngine
from support.plans import VECTORS, plan_of
from support.resolving_engine import front_end
from support.tokenizers import byte_level

import midstream
from midstream import Capture, Probe, Steer
from midstream.plan import Plan
from midstream.runtime.frontend.request.call_plan import CallPlan

PACKAGE = str(Path(midstream.__file__).parent) + "/"
POST = ("resid_post", 1)
EVERYWHERE = ((0, None),)


class Stage(NamedTuple):
    """What one stage entered.

    Attributes:
        files: files of the package whose functions ran.
        functions: number of functions that ran.
        calls: number of calls of functions of the package.
        crossings: number of those calls that came from another file of the package.
    """

    files: frozenset[str]
    functions: int
    calls: int
    crossings: int


class Profile:
    """Counts the calls of functions of the package."""

    def __init__(self) -> None:
        self._functions: set[tuple[str, str]] = set()
        self._calls = self._crossings = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = code.co_filename
        # A comprehension is a part of its function, and a module that is imported is no call.
        if event != "call" or not file.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        self._calls += 1
        self._functions.add((file, getattr(code, "co_qualname", code.co_name)))
        caller = frame.f_back
        self._crossings += caller is not None and caller.f_code.co_filename != file

    def stage(self) -> Stage:
        """Return what was counted."""
        files = frozenset(file.removeprefix(PACKAGE) for file, _ in self._functions)
        return Stage(files, len(self._functions), self._calls, self._crossings)


@contextmanager
def profiled(stages: dict[str, Stage], name: str) -> Iterator[None]:
    """Count a block's calls as a stage."""
    profile, before = Profile(), sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        stages[name] = profile.stage()


def make_parts() -> tuple[Capture, Steer, Probe]:
    """Return a capture, an edit and a probe of one layer, in no special form."""
    vector = [1.0, 2.0, 2.0]
    return Capture(layers=[1]), Steer(vector, 1), Probe(vector, 1, name="probe")


def front_end_stages() -> dict[str, Stage]:
    """Return the stages from the objects of a plan to the bytes that go to the engine."""
    front = front_end(byte_level())
    stages: dict[str, Stage] = {}

    def resolve(plan: Plan, length: int) -> None:
        request = SimpleNamespace(
            prompt_token_ids=[5] * length,
            prompt_is_token_ids=None,
            sampling_params=SimpleNamespace(max_tokens=4, n=1),
        )
        front.plans.resolve(request, CallPlan(plan), (), ())

    resolve(_plan(), 30)  # what is imported or made on first use
    with profiled(stages, "construct a capture, an edit and a probe"):
        capture, edit, probe = make_parts()
    with profiled(stages, "make a plan of them"):
        plan = Plan.make(capture=capture, edits=[edit], probes=[probe])
    with profiled(stages, "resolve, check and pack it"):
        resolve(plan, 20)
    with profiled(stages, "the same for a prompt that is a token longer"):
        resolve(plan, 21)
    return stages


def _plan() -> Plan:
    capture, edit, probe = make_parts()
    return Plan.make(capture=capture, edits=[edit], probes=[probe])


def worker_stages() -> dict[str, Stage]:
    """Return the stages of a worker: a request with an edit and a capture comes, and one step."""
    stages: dict[str, Stage] = {}
    plan = plan_of(edits=[(POST, VECTORS[0], 2.0, EVERYWHERE)], captures=[([POST], EVERYWHERE)])
    engine = FakeEngine()
    _step(engine, Fake("before", plan), {})  # what is imported or made on first use
    _step(engine, Fake("after", plan), stages)
    return stages


def _step(engine: FakeEngine, fake: Fake, stages: dict[str, Stage]) -> None:
    session = engine.session
    with profiled(stages, "worker: the request comes"):
        engine.add(fake)
    view = engine.view([(fake, 4)])
    with profiled(stages, "worker: before the forward pass"):
        session.before_forward(view)
    engine.forward(view.num_tokens)
    with profiled(stages, "worker: after it"):
        session.after_forward()


def entered(stages: dict[str, Stage], choose: Callable[[str], bool]) -> frozenset[str]:
    """Return the files that chosen stages entered."""
    files = (stage.files for name, stage in stages.items() if choose(name))
    return frozenset().union(*files)


def main() -> None:
    stages: dict[str, Any] = {**front_end_stages(), **worker_stages()}
    sys.stdout.write(f"{'stage':46} {'files':>6} {'functions':>10} {'calls':>6} {'others':>7}\n")
    for name, stage in stages.items():
        counts = f"{len(stage.files):6} {stage.functions:10} {stage.calls:6} {stage.crossings:7}"
        sys.stdout.write(f"{name:46} {counts}\n")
    sys.stdout.write(f"{len(entered(stages, lambda _: True))} files in all\n")


if __name__ == "__main__":
    main()
