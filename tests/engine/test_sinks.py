"""Captured rows in sinks: the rows that the output would have had, whatever else goes wrong."""

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.refusals import assert_refused
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, generated, greedy, tokens
from support.sinking import Keeping

import midstream
from midstream import Capture
from midstream.compat.consumers import FilesystemCaptureRequest
from midstream.errors import ConfigError, ExistsError, ReceiptError, SpecError
from midstream.results.activations import Activations
from midstream.sinks import registry as finding
from midstream.store import open_store

PROMPTS = [tokens(list(range(3 + n, 8 + 3 * n))) for n in range(12)]
PARAMS = greedy(5, detokenize=False)
# More than one of them is more than what this may hold.
QUEUE_BYTES = 20_000
HERE = Keeping()  # given to the engine as an object


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sinks")


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, folder: Path) -> Iterator[Any]:
    """One engine with every sink, and one of them for every request."""
    offered = {"keeping": "Keeping", "failing": "Failing", "probe": "Keeping"}
    entries = [
        EntryPoint(name, f"support.sinking:{cls}", finding.GROUP) for name, cls in offered.items()
    ]
    sinks = {
        "store": {"root": str(folder / "store"), "prompts": True},
        "npz": {"root": folder / "npz"},
        "filesystem": f"root={folder / 'filesystem'}",
        "log": {"level": "debug"},
        "keeping": {"queue_bytes": QUEUE_BYTES},
        "here": HERE,
        "path": "support.sinking:Keeping",
        "failing": {},
        "probe": {"capture": {"layers": [-1], "positions": "last_prompt", "tag": "probe"}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "entry_points", lambda group: entries)
        with engine(
            tiny_llama,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            midstream={"sites": ALL_SITES, "sinks": sinks},
        ) as found:
            yield found


def sink_of(llm: Any, name: str) -> Keeping:
    found = inspect(llm).sink(name)
    assert isinstance(found, Keeping)
    return found


def run(llm: Any, prompts: Any, capture: Any, params: Any = PARAMS) -> list[Any]:
    outputs: list[Any] = llm.generate(prompts, params, capture=capture, use_tqdm=False)
    return outputs


def assert_same(mine: Activations, theirs: Activations) -> None:
    assert list(mine) == list(theirs)
    for tap in theirs:
        assert torch.equal(mine[tap], theirs[tap]), tap
        assert torch.equal(mine.positions_of(*tap), theirs.positions_of(*tap))
        assert torch.equal(mine.token_ids_of(*tap), theirs.token_ids_of(*tap))


def stored(output: Any) -> Any:
    """What the store has of an output's only completion."""
    manifest = output.capture_results["store"].manifest
    return open_store(manifest["store"]).find(manifest["request"], manifest["child"])


@pytest.mark.parametrize(
    ("codec", "positions"),
    [
        ("raw", "all"),
        ("full8", ["last_prompt", "last_row"]),
        ("rp8:k=16", "generated"),
        ("topk8:k=8", "all"),
    ],
)
def test_each_sink_has_the_rows_that_are_in_memory_bit_by_bit(llm, codec, positions):
    captures = [
        Capture("all", ALL_SITES, positions, codec=codec, sink=sink, tag=codec.partition(":")[0])
        for sink in ("memory", "store", "npz", "keeping")
    ]
    before = len(sink_of(llm, "keeping").given)
    for output, prompt in zip(run(llm, PROMPTS, [captures] * 12), PROMPTS, strict=True):
        rows = output.activations
        assert output.receipt.status == "ok"
        length = len(prompt["prompt_token_ids"]) + 4
        whole = [*prompt["prompt_token_ids"], *generated(output)]
        expected = {"all": list(range(length)), "generated": list(range(length - 4, length))}
        known = expected.get(str(positions), [length - 5, length - 1])
        assert rows.positions.tolist() == known
        assert rows.token_ids.tolist() == [whole[p] for p in known]
        kept = stored(output).activations()
        assert_same(kept, rows)
        for tap in rows:
            assert torch.equal(kept.encoded(*tap), rows.encoded(*tap))
            (path,) = [
                one["path"]
                for one in output.activation_manifest["files"]
                if (one["site"], one["layer"]) == tap
            ]
            with np.load(path) as found:
                assert found["positions"].tolist() == known
                assert found["token_ids"].tolist() == rows.token_ids.tolist()
                assert np.array_equal(read(found, codec), rows[tap].numpy())
    given = sorted(sink_of(llm, "keeping").given[before:], key=lambda one: int(one.request_id))
    assert [one.prompt_token_ids for one in given] == [
        tuple(prompt["prompt_token_ids"]) for prompt in PROMPTS
    ]


def read(found: Any, codec: str) -> Any:
    """The vectors of an npz file, by the formula that the page has."""
    if codec == "raw":
        return found["rows"]
    values = found["zero"][:, None] + found["scale"][:, None] * found["q"].astype(np.float32)
    if not codec.startswith("topk8"):
        return values
    full = np.zeros((len(values), 64), np.float32)
    np.put_along_axis(full, found["indices"], values, axis=1)
    return full


def test_two_sinks_at_once_get_their_own_captures(llm):
    captures = [Capture(0, sink="store", positions="prompt"), Capture([0, 2], sink="keeping")]
    (output,) = run(llm, [PROMPTS[1]], [captures])
    assert not hasattr(output, "activations")
    (given,) = [one for one in sink_of(llm, "keeping").given if one.request_id == output.request_id]
    assert given.activations.layers == (0, 2)
    assert len(given.activations.positions) == 11
    rows = stored(output).activations()
    assert list(rows) == [("resid_post", 0)]
    assert len(rows.positions) == 7
    assert torch.equal(rows["resid_post", 0], given.activations["resid_post", 0][:7])
    assert set(output.capture_results) == {"store", "keeping", "probe"}


def test_sinks_given_as_an_object_and_by_class_path_have_the_rows(llm):
    captures = [Capture(1), Capture(1, sink="here"), Capture(1, sink="path")]
    (output,) = run(llm, [PROMPTS[1]], [captures])
    assert sink_of(llm, "here") is HERE
    for sink in (HERE, sink_of(llm, "path")):
        (given,) = sink.given
        assert_same(given.activations, output.activations)


def test_a_capture_of_every_request_is_there_beside_its_own_and_without(llm):
    probe = sink_of(llm, "probe")
    before = len(probe.given)
    own, bare, short = (
        run(llm, PROMPTS[3], Capture(0))[0],
        run(llm, PROMPTS[3], None)[0],
        run(llm, PROMPTS[3], None, greedy(1, detokenize=False))[0],
    )
    expected = run(llm, PROMPTS[3], Capture(2, positions="last_prompt"))[0].activations
    for output, given in zip((own, bare, short), probe.given[before:], strict=False):
        assert given.request_id == output.request_id
        assert list(given.activations) == [("resid_post", 2)]
        assert given.activations.positions.tolist() == [10]
        assert given.tag == "probe"
        torch.testing.assert_close(
            given.activations["resid_post", 2], expected["resid_post", 2], rtol=1e-4, atol=1e-4
        )
    assert own.activations.layers == (0,)
    assert not hasattr(bare, "activations")
    assert bare.receipt.status == "ok"
    assert [each.what for each in bare.receipt.selected] == ["sinks[-1]"]
    assert bare.capture_results == {"probe": bare.capture_results["probe"]}


def test_which_sinks_there_are_is_not_in_what_is_hashed_with_compiled_graphs(llm):
    config = llm.llm_engine.vllm_config
    assert "sinks" not in config.additional_config["midstream"]
    assert inspect(llm).sink_names[:3] == ("memory", "store", "npz")


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("write", "sink failing: OSError: [Errno 28] No space left on device"),
        ("flush", "sink failing: RuntimeError: the disk is gone"),
    ],
)
def test_a_sink_that_fails_is_an_error_of_its_requests_and_of_nobody_else(llm, tag, problem):
    captures = [
        [Capture(1, sink="failing", tag=tag), Capture(0), Capture(2, sink="store")],
        [Capture(1, sink="store")],
        None,
    ]
    with pytest.raises(ReceiptError) as caught:
        run(llm, PROMPTS[:3], captures)
    first, second, third = caught.value.outputs
    assert problem in str(caught.value)
    assert first.receipt.problems == (problem,)
    assert first.receipt.status == "error"
    assert first.capture_results["failing"].status == "error"
    assert first.capture_results["failing"].reason in problem
    assert first.capture_results["store"].status == "ok"
    assert len(first.activations.positions) == 9
    assert second.receipt.status == third.receipt.status == "ok"
    assert stored(first).activations().layers == (2,)
    assert stored(second).activations().layers == (1,)
    (after,) = run(llm, [PROMPTS[0]], Capture(1, sink="failing", tag="well"))
    assert after.capture_results["failing"].status == "ok"
    inspect(llm).check_integrity()


def test_the_consumers_request_is_kept_under_its_tag_and_id(llm, folder):
    params = midstream.SamplingParams(
        max_tokens=16,
        capture={
            "filesystem": FilesystemCaptureRequest(
                request_id="probe_0001",
                tag="mnist-probe-v1",
                hooks={"post_block": [2]},
                positions="last_prompt",
            )
        },
        detokenize=False,
        temperature=0,
    )
    (output,) = llm.generate(PROMPTS[4], params, use_tqdm=False)
    result = output.capture_results["filesystem"]
    assert (result.status, result.reason) == ("ok", "")
    own = folder / "filesystem" / "mnist-probe-v1" / "probe_0001"
    assert sorted(path.name for path in own.iterdir()) == ["manifest.json", "resid_post.2.npz"]
    assert json.loads((own / "manifest.json").read_text())["name"] == "probe_0001"
    expected = run(llm, PROMPTS[4], Capture(2, positions="last_prompt"))[0].activations
    with np.load(own / "resid_post.2.npz") as found:
        assert found["positions"].tolist() == [12]
        np.testing.assert_allclose(found["rows"], expected["resid_post", 2], rtol=1e-4, atol=1e-4)
    with pytest.raises(SpecError, match="probe_0001 exists already") as caught:
        llm.generate(PROMPTS[4], params, use_tqdm=False)
    assert caught.value.path.endswith("capture[0].request_id")


def test_an_id_that_the_store_has_is_refused_before_anything_runs(llm, folder):
    asked = Capture(2, sink="store", request_id="mine")
    (first,) = run(llm, PROMPTS[4], asked)
    assert first.capture_results["store"].status == "ok"
    for prompts in (PROMPTS[4], PROMPTS[5:7]):
        with pytest.raises(ExistsError, match="has 'mine' already") as caught:
            run(llm, prompts, asked)
        assert caught.value.path == "capture.request_id"
    several = Capture(2, sink="store", request_id="for_both")
    with pytest.raises(ExistsError, match="a running request .* for each prompt its own"):
        run(llm, PROMPTS[5:7], several)
    (alone,) = run(llm, PROMPTS[5], several)
    assert alone.capture_results["store"].status == "ok"
    store = open_store(folder / "store")
    for name, prompt in (("mine", PROMPTS[4]), ("for_both", PROMPTS[5])):
        expected = run(llm, prompt, Capture(2))[0].activations
        torch.testing.assert_close(store.get(name)["resid_post", 2], expected["resid_post", 2])
    inspect(llm).check_integrity()


def test_a_place_that_cannot_be_is_refused_at_the_front_door_by_name(llm, folder):
    (folder / "filesystem").mkdir(exist_ok=True)
    (folder / "filesystem" / "linked").symlink_to(folder)
    assert_refused(
        lambda asked: run(llm, PROMPTS[0], {"layers": [1], **asked}),
        [
            ({"sink": "stor"}, "capture.sink", "no sink 'stor' .did you mean `store`"),
            ({"sink": "filesystem", "tag": "../up"}, "capture.tag", "A-Z a-z"),
            ({"sink": "filesystem", "tag": "/etc"}, "capture.tag", "A-Z a-z"),
            ({"sink": "filesystem", "request_id": ".."}, "capture.request_id", "A-Z a-z"),
            ({"sink": "filesystem", "tag": "linked"}, "capture.tag", "linked is not a folder"),
        ],
    )
    (after,) = run(llm, [PROMPTS[0]], Capture(1))
    assert after.receipt.status == "ok"


def test_wrong_settings_of_a_sink_keep_the_engine_from_starting(tiny_llama):
    for capture, problem in (
        ({"layers": [1, 7]}, "layer 7 is out of range"),
        (
            {"layers": 1, "sites": "mlp_out"},
            "midstream.sinks.log.capture.sites: .*mlp_out.*not tapped",
        ),
    ):
        own = {"sites": ALL_SITES, "sinks": {"log": {"capture": capture}}}
        with pytest.raises(ConfigError, match=problem), engine(tiny_llama, midstream=own):
            pass
