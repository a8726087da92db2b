"""A plain plan enters few files: what it does not ask for has no part in its way."""

import ast
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_steps import Fake, FakeEngine
from support.plans import VECTORS, plan_of
from support.resolving_engine import front_end
from support.syntax import nodes_of
from support.tokenizers import byte_level

import midstream
from midstream import Capture, Plan, Probe, Steer
from midstream.plan.readouts import KINDS
from midstream.results.readouts import RESULTS
from midstream.runtime.frontend.request.call_plan import CallPlan

# A change that enters more files says in its commit what they are for.
MOST_RESOLVED = 30
MOST_OF_A_WORKER = 40
# What the commit of a new read-out touches.
MOST_OF_A_READ_OUT = 6
PACKAGE = Path(midstream.__file__).parent
PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))


@contextmanager
def entered(files):
    """Add the files of the package whose functions a block calls."""

    def profile(frame, event, _):
        code = frame.f_code
        # A comprehension is a part of its function, and a module that is imported is no call.
        if event == "call" and not code.co_name.startswith("<"):
            files.add(code.co_filename)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        files -= {file for file in files if not file.startswith(str(PACKAGE))}


def test_a_plain_plan_is_resolved_by_few_files():
    front, files = front_end(byte_level()), set()
    vector = [1.0, 2.0, 2.0]
    capture, edit, probe = Capture(layers=[1]), Steer(vector, 1), Probe(vector, 1, name="probe")
    plan = Plan.make(capture=capture, edits=[edit], probes=[probe])

    def resolve(length):
        request = SimpleNamespace(
            prompt_token_ids=[5] * length,
            prompt_is_token_ids=None,
            sampling_params=SimpleNamespace(max_tokens=4, n=1),
        )
        front.plans.resolve(request, CallPlan(plan), (), ())

    resolve(30)  # what is imported or made on first use
    with entered(files):
        resolve(20)
    assert len(files) <= MOST_RESOLVED, sorted(files)


def test_a_plain_request_and_its_step_enter_few_files_of_the_worker():
    everywhere = ((0, None),)
    edits = [(("resid_post", 1), VECTORS[0], 2.0, everywhere)]
    plan = plan_of(edits=edits, captures=[([("resid_post", 1)], everywhere)])
    engine = FakeEngine()
    for name in ("before", "after"):  # what is imported or made on first use is not counted
        files, fake = set(), Fake(name, plan)
        with entered(files):
            engine.add(fake)
        view = engine.view([(fake, 4)])
        with entered(files):
            engine.session.before_forward(view)
        engine.forward(view.num_tokens)
        with entered(files):
            engine.session.after_forward()
    assert 10 < len(files) <= MOST_OF_A_WORKER, sorted(files)


@pytest.mark.parametrize(("key", "most"), [("norms", MOST_OF_A_READ_OUT), ("features", 14)])
def test_a_read_out_is_named_by_few_files_of_the_package(key, most):
    """Its two files, two tables and two lists of names; with registered weights, what has these."""
    kind, result = KINDS[key], RESULTS[key]
    files = {path for path in PACKAGE_FILES if _names_any(path, kind, result)}
    ours = {PACKAGE / f"{path}.py" for path in (f"plan/readouts/{key}", f"results/readouts/{key}")}
    assert ours | {PACKAGE / "results/readouts/__init__.py", PACKAGE / "__init__.py"} <= files
    assert len(files) <= most, sorted(files)


def _names_any(path, *kinds):
    """Return whether a file defines one of some classes, or imports it or from its module."""
    modules = {kind.__module__ for kind in kinds}
    if path.with_suffix("").relative_to(PACKAGE.parent).as_posix().replace("/", ".") in modules:
        return True
    lists = ("midstream", "midstream.plan", "midstream.plan.readouts", "midstream.results.readouts")
    return any(
        node.module in modules
        or (
            node.module in lists
            and any(a.name == kind.__name__ for a in node.names for kind in kinds)
        )
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
    )
