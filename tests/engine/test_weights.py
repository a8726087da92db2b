"""Weights that change while the engine runs: nothing of the old ones is served afterwards, and
receipts say on which a request ran. The reference is transformers on the new weights.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine.asking import ask
from support import adapters
from support.alongside import EVERYTHING, PUSH, check_rows, hooked, push, rows_of
from support.cached_pair import fresh
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, generated, greedy
from support.nightly import rounds
from support.open_files import PIPE, SOCKET, open_files
from support.oracle import HookEdit, Oracle, relative_error
from support.reloading import other_weights, reload, resident_bytes
from support.updating import Stepped

from midstream import Capture, Lens, Probe, Steer
from midstream.results.receipt import WeightVersion

PLACES = ("model.layers", "post_attention_layernorm")
CYCLES = rounds(suite=6, nightly=100)
REUSED = Capture("all", ALL_SITES, reuse=True)
PROBE = Probe(PUSH, 2, name="p")


@dataclass(frozen=True)
class Weights:
    """A folder with weights, and transformers with them."""

    path: Path
    oracle: Oracle


@dataclass
class Served:
    """An engine that loads one of several weights at a time."""

    llm: Any
    all: list[Weights]
    loaded: int = 0

    def load(self, nth: int) -> Weights:
        """Load the weights; return them."""
        reload(self.llm, self.all[nth].path)
        self.loaded = nth
        return self.all[nth]

    def load_others(self) -> Weights:
        """Load weights that are not loaded; return them."""
        return self.load((self.loaded + 1) % len(self.all))

    @property
    def now(self) -> Weights:
        return self.all[self.loaded]


@pytest.fixture(scope="module")
def weights(tiny_llama: Path, tiny_models: Path) -> list[Weights]:
    paths = [
        tiny_llama,
        *(other_weights(tiny_llama, tiny_models / f"reloaded{nth}", nth) for nth in (1, 2)),
    ]
    return [Weights(path, Oracle(path, *PLACES)) for path in paths]


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "compiled"])
def served(request: pytest.FixtureRequest, weights: list[Weights]) -> Iterator[Served]:
    with engine(
        weights[0].path,
        enforce_eager=request.param,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=32,
        enable_prefix_caching=True,
        midstream={
            "sites": [*ALL_SITES, "final_norm", "logits"],
            "reuse_bytes": 8 << 20,
            "readout_bytes": 1 << 20,
        },
    ) as llm:
        yield Served(llm, weights)


ONE = pytest.mark.parametrize("served", [True], indirect=True, ids=["eager"])


def check_scores(weights: Weights, output: Any, prompt: list[int], edits: Any = ()) -> None:
    """Scores must be those of transformers with these weights."""
    seen = weights.oracle.run(rows_of(prompt, generated(output)), edits).values["resid_post", 2]
    assert relative_error(output.probes["p"], seen @ PUSH) < 1e-4


def check(weights: Weights, output: Any, prompt: list[int], edits: Any = ()) -> None:
    """Rows, scores and tokens must be those of transformers with these weights."""
    rows = rows_of(prompt, generated(output))
    logits = check_rows(weights.oracle, output, rows, edits)
    assert generated(output) == logits[len(prompt) - 1 :].argmax(-1).tolist()
    if getattr(output, "probes", None) is not None:
        check_scores(weights, output, prompt, edits)


def test_rows_scores_and_edits_are_those_of_the_new_weights(served: Served) -> None:
    """The prefix cache is not reset: it has blocks, scores and rows of the same tokens."""
    prompt = fresh(80)
    asked: list[dict[str, Any]] = [
        {"capture": REUSED, "probes": PROBE},
        {"capture": EVERYTHING, "probes": PROBE, "edits": [push()]},
        {"probes": PROBE},
    ]
    for _ in range(3):
        here = served.load_others()
        for attempt in range(2):
            cached = 64 if attempt else 0
            out = ask(served.llm, prompt, capture=REUSED, probes=PROBE)
            check(here, out, prompt)
            assert out.num_cached_tokens == cached
            assert {tap.reused for tap in out.receipt.captured} == {cached}
            out = ask(served.llm, prompt, **asked[1])
            check(here, out, prompt, [hooked()])
            out = ask(served.llm, prompt, **asked[2])
            assert out.num_cached_tokens == 64  # with its scores
            check_scores(here, out, prompt)


def test_requests_without_a_plan_are_not_served_blocks_of_old_weights(served: Served) -> None:
    prompt = fresh(80)
    ask(served.llm, prompt)
    here = served.load_others()
    out = ask(served.llm, prompt)
    assert out.num_cached_tokens == 0
    logits = here.oracle.run(rows_of(prompt, generated(out))).logits
    assert generated(out) == logits[len(prompt) - 1 :].argmax(-1).tolist()


def test_lenses_and_directions_of_tokens_read_the_new_weights(served: Served) -> None:
    prompt, token = fresh(40), 17
    plan: dict[str, Any] = {
        "capture": [[EVERYTHING, Lens([1], top=5)]],
        "edits": Steer(token=token, layer=1, scale=3.0),
    }
    for _ in range(2):
        here = served.load_others()
        model = here.oracle.model.requires_grad_(False)
        read = model.model.norm.weight.double() * model.lm_head.weight[token].double()
        direction = (read / read.norm()).float()
        assert relative_error(served.llm.lenses.direction(token, 1), direction) < 1e-5
        out = ask(served.llm, prompt, **plan)
        rows = rows_of(prompt, generated(out))
        seen = here.oracle.run(rows, [HookEdit("resid_post", 1, direction, 3.0, lambda _: True)])
        assert relative_error(out.activations["resid_post", 1], seen.values["resid_post", 1]) < 1e-4
        decoded = model.lm_head(model.model.norm(seen.values["resid_post", 1]))
        lens = out.lens["logit"]
        expected = decoded[:, None].gather(2, lens.ids.long())
        assert relative_error(lens.values, expected) < 1e-4


def test_a_change_gives_the_next_version_which_receipts_carry(served: Served) -> None:
    llm, prompt = served.llm, fresh(40)
    served.load_others()
    before = llm.weight_version
    out = ask(llm, prompt, capture=Capture(0))
    assert out.receipt.weight_version == before
    assert out.receipt.weight_versions == (before,)
    assert llm.weight_version == before
    # One parameter after the other, as trainers load them: one change.
    for _ in range(3):
        served.load_others()
    assert llm.weight_version.number == before.number + 1
    out = ask(llm, prompt, capture=Capture(0))
    assert out.receipt.weight_version.number == before.number + 1
    assert f"weights: version {before.number + 1}" in str(out.receipt)
    assert out.receipt.to_dict()["weight_versions"] == [{"number": before.number + 1, "name": ""}]


@ONE
def test_callers_give_versions_a_name(served: Served) -> None:
    llm, prompt = served.llm, fresh(40)
    served.load_others()
    number = llm.weight_version.number
    llm.update_weight_version("step 7")
    assert llm.weight_version == WeightVersion(number, "step 7")
    assert ask(llm, prompt, capture=Capture(0)).receipt.weight_version.name == "step 7"
    # Another name says that weights changed, in a way that the engine does not see.
    llm.update_weight_version("step 8")
    assert llm.weight_version == WeightVersion(number + 1, "step 8")
    out = ask(llm, prompt, capture=Capture(0))
    assert out.receipt.weight_version == WeightVersion(number + 1, "step 8")


def test_a_request_that_runs_over_a_change_names_both_versions(served: Served) -> None:
    """Its blocks, scores and rows are of neither weights alone, and are served to nobody."""
    llm, prompt = served.llm, fresh(20)
    ask(llm, fresh(8), capture=Capture(0))
    before = llm.weight_version
    run = Stepped(llm)
    asked: dict[str, Any] = {"capture": [REUSED], "probes": [PROBE]}
    run.add("over", prompt, greedy(60, detokenize=False), **asked)
    run.step(5)
    served.load_others()
    # It waits for its first step: the blocks of its prompt were hashed before the change.
    old = fresh(80)
    run.add("late", old, greedy(4, detokenize=False), **asked)
    here = served.load_others()
    outputs = run.finish()
    after = llm.weight_version
    assert outputs["over"].receipt.weight_versions == (before, after)
    assert outputs["over"].receipt.status == "ok"
    assert outputs["late"].receipt.weight_versions == (after,)
    check(here, outputs["late"], old)
    again = [*prompt, *generated(outputs["over"])]
    out = ask(llm, again, capture=REUSED, probes=PROBE)
    assert out.num_cached_tokens == 0
    check(here, out, again)


@ONE
def test_a_request_hashed_before_a_change_is_not_served_what_it_was_hashed_for(
    served: Served,
) -> None:
    llm, prompt = served.llm, fresh(80)
    ask(llm, prompt, probes=PROBE)  # its blocks have the key of these weights
    run = Stepped(llm)
    run.add("waits", prompt, greedy(4, detokenize=False), probes=[PROBE])
    here = served.load_others()
    out = run.finish()["waits"]
    assert out.num_cached_tokens == 0
    check_scores(here, out, prompt)


def test_weights_that_are_written_in_the_workers_process_count(weights: list[Weights]) -> None:
    """As TRL does where the trainer and the engine share a process."""
    prompt = fresh(80)
    settings = {"sites": ALL_SITES, "reuse_bytes": 8 << 20}
    with engine(weights[0].path, block_size=32, midstream=settings) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        here = Weights(weights[0].path, Oracle(weights[0].path, *PLACES))
        # On a CPU vLLM packs the others, and only `reload_weights` can write them.
        names = "model.embed_tokens.weight", "model.norm.weight"
        for number in range(3):
            for name in names if number else ():
                value = here.oracle.model.get_parameter(name).detach()
                value += 0.1 * value.roll(1, 0)
                runner.model.load_weights([(name, value)])
            assert not number or llm.reset_prefix_cache()
            for cached in (0, 64):
                out = ask(llm, prompt, capture=REUSED, probes=PROBE)
                assert out.num_cached_tokens == cached
                check(here, out, prompt)
                assert out.receipt.weight_version.number == number


@ONE
def test_level_two_of_sleep_gives_a_new_version_and_level_one_does_not(served: Served) -> None:
    """vLLM on a CPU keeps the weights; tests/gpu has the cycles that drop them."""
    llm, prompt = served.llm, fresh(80)
    ask(llm, prompt, capture=REUSED)
    before = llm.weight_version
    llm.sleep(level=1)
    llm.wake_up()
    out = ask(llm, prompt, capture=REUSED)
    assert out.receipt.weight_version == before
    llm.sleep(level=2)
    llm.wake_up()
    here = served.load_others()
    out = ask(llm, prompt, capture=REUSED, probes=PROBE)
    check(here, out, prompt)
    assert out.receipt.weight_version.number == before.number + 1


@ONE
def test_cycles_under_traffic_serve_nothing_old_and_leave_nothing(served: Served) -> None:
    llm, prompts = served.llm, [fresh(70) for _ in range(4)]
    kinds: list[dict[str, Any]] = [
        {"capture": [REUSED], "probes": [PROBE]},
        {"capture": [EVERYTHING], "edits": [push()]},
        {"probes": [PROBE]},
    ]
    sizes = []
    for cycle in range(CYCLES):
        run = Stepped(llm)
        for nth, prompt in enumerate(prompts):
            run.add(f"a{nth}", prompt, greedy(6, detokenize=False), **kinds[nth % 3])
        run.step(3)
        earlier = llm.weight_version
        if cycle % 2:
            here = served.load_others()
        else:
            llm.sleep(level=2, mode="keep")
            here = served.load_others()
            llm.wake_up()
        for nth, prompt in enumerate(prompts):
            run.add(f"b{nth}", prompt, greedy(6, detokenize=False), **kinds[nth % 3])
        outputs, later = run.finish(), llm.weight_version
        assert later.number == earlier.number + 1
        for nth, prompt in enumerate(prompts):
            over, out = outputs[f"a{nth}"], outputs[f"b{nth}"]
            assert over.receipt.status == "ok"
            assert over.receipt.weight_versions[-1] == later
            assert out.receipt.weight_versions == (later,)
            edits = [hooked()] if nth % 3 == 1 else []
            (check if nth % 3 < 2 else check_scores)(here, out, prompt, edits)
        del run, outputs, over, out
        gc.collect()
        sizes.append((resident_bytes(), len(open_files(SOCKET, PIPE))))
        assert not inspect(llm).leftovers()
    settled = sizes[len(sizes) // 2]
    assert sizes[-1][1] <= settled[1]
    assert sizes[-1][0] - settled[0] < 64 << 20


@pytest.fixture(scope="module")
def adapted(tiny_llama: Path) -> Iterator[Any]:
    with engine(
        tiny_llama,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        block_size=32,
        enable_prefix_caching=True,
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        midstream={"sites": ALL_SITES, "reuse_bytes": 8 << 20},
    ) as llm:
        yield llm


WAYS = ["in place", "removed", "another number", "displaced", "by its request"]


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_of_the_same_name_and_path_with_other_weights(
    adapted: Any, way: str, tiny_llama: Path, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    prompt, numbers = fresh(80), []
    number = 10 * (1 + WAYS.index(way))
    for seed in (1, 2):
        if seed == 2 and way == "displaced":
            for other in range(1, 4):  # as many as the workers keep
                path = adapters.make(tiny_llama, tmp_path / f"other{other}", other)
                more = LoRARequest(f"other{other}", number + other, str(path))
                ask(adapted, prompt, lora_request=more)
        folder = adapters.make(tiny_llama, tmp_path / "adapter", seed)
        merged = adapters.merge(tiny_llama, folder, tmp_path / f"merged{seed}")
        here = Weights(merged, Oracle(merged, *PLACES))
        adapter = LoRARequest(way, number, str(folder))
        if seed == 2 and way == "in place":
            changed = LoRARequest(way, number, str(folder), load_inplace=True)
            assert adapted.llm_engine.add_lora(changed)
        elif seed == 2 and way == "removed":
            assert adapted.llm_engine.remove_lora(number)
        elif seed == 2 and way == "another number":
            adapter = LoRARequest(way, number + 1, str(folder))
        for cached in (0, 64):
            asked = adapter
            if seed == 2 and way == "by its request" and not cached:
                asked = LoRARequest(way, number, str(folder), load_inplace=True)
            out = ask(adapted, prompt, capture=REUSED, probes=PROBE, lora_request=asked)
            is_alone = seed == 2 and way in WAYS[3:]  # the request that loads it, and the next one
            assert out.num_cached_tokens == (0 if is_alone else cached)
            check(here, out, prompt)
        numbers.append(out.receipt.weight_version.number)
    assert numbers[1] == numbers[0] + 1
