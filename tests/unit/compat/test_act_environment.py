"""`VLLM_ACT_*`: what the variables mean, and that nothing else is taken for it."""

import cloudpickle
import pytest
from support.refusals import refused

from midstream.compat.act_environment import WORKER_CLASS, from_act_environment, is_capture_worker
from midstream.config.sinks import read_sinks
from midstream.errors import ConfigError, UnsupportedError
from midstream.plan import Capture
from midstream.worker import CaptureWorker

ON = {"VLLM_ACT_CAPTURE": "1"}


def test_without_capture_there_are_no_settings():
    assert from_act_environment({"VLLM_ACT_MODE": "nonsense"}) is None
    for value in ("", "0", " "):
        given = {"VLLM_ACT_MODE": "nonsense", "VLLM_ACT_CAPTURE": value}
        assert from_act_environment(given) is None


def test_by_default_all_layers_of_every_request_go_to_files_as_sketches_of_512():
    config = from_act_environment(ON)
    assert (config.sites, config.layers, config.codec) == (
        ("resid_post",),
        "all",
        "rp8:k=512,seed=0",
    )
    (sink,) = read_sinks(config.sinks)
    assert (sink.name, sink.own) == ("npz", {"root": "/tmp/vllm_activations"})
    assert sink.captures == (Capture("all", "resid_post", "all", sink="npz"),)


def test_the_mode_is_the_codec():
    for variables, codec in (
        ({"VLLM_ACT_MODE": "rp8", "VLLM_ACT_RP_K": "256"}, "rp8:k=256,seed=0"),
        ({"VLLM_ACT_RP_K": "16384"}, "rp8:k=16384,seed=0"),
        ({"VLLM_ACT_MODE": "full8", "VLLM_ACT_RP_K": "256"}, "full8"),
        ({"VLLM_ACT_MODE": "topk8"}, "topk8:k=64"),
        ({"VLLM_ACT_MODE": "raw", "VLLM_ACT_RETURN": "gathered"}, "raw"),
        ({"VLLM_ACT_MODE": "", "VLLM_ACT_RP_K": "", "VLLM_ACT_RETURN": ""}, "rp8:k=512,seed=0"),
    ):
        assert from_act_environment({**ON, **variables}).codec == codec, variables


def test_the_folder_is_that_of_the_sink():
    config = from_act_environment({**ON, "VLLM_ACT_OUTDIR": "/data/acts"})
    assert config.sinks["npz"]["root"] == "/data/acts"
    assert config.return_ == "sharded"
    assert from_act_environment({**ON, "VLLM_ACT_RETURN": "gathered"}).return_ == "gathered"


def test_a_value_that_is_none_is_refused_by_the_variables_name():
    refused(
        from_act_environment,
        ({"VLLM_ACT_CAPTURE": "yes"}, "VLLM_ACT_CAPTURE: expected one of `0`, `1`, got 'yes'"),
        ({**ON, "VLLM_ACT_MODE": "rp4"}, "VLLM_ACT_MODE: expected one of `rp8`, `full8`, `topk8`"),
        ({**ON, "VLLM_ACT_RETURN": "all"}, "VLLM_ACT_RETURN: expected one of `sharded`, `gather"),
        ({**ON, "VLLM_ACT_RP_K": "0"}, "VLLM_ACT_RP_K: expected 1 to 16384, got '0'"),
        ({**ON, "VLLM_ACT_RP_K": "16385"}, "VLLM_ACT_RP_K: expected 1 to 16384, got '16385'"),
        ({**ON, "VLLM_ACT_RP_K": "many"}, "VLLM_ACT_RP_K: expected 1 to 16384, got 'many'"),
        ({**ON, "VLLM_ACT_RP_K": "8,seed=1"}, "VLLM_ACT_RP_K: expected 1 to 16384, got '8,seed=1'"),
        error=ConfigError,
    )


def test_the_environment_is_read_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "1")
    assert from_act_environment() is not None
    monkeypatch.setenv("VLLM_ACT_CAPTURE", "0")
    assert from_act_environment() is None


def test_the_worker_class_is_a_name_that_the_front_end_replaces():
    assert f"{CaptureWorker.__module__}.{CaptureWorker.__qualname__}" == WORKER_CLASS
    with pytest.raises(UnsupportedError, match="did not load midstream"):
        CaptureWorker(None, 0, local_rank=0)


def test_the_worker_class_is_known_by_name_as_a_class_and_as_vllm_pickles_it():
    assert is_capture_worker(WORKER_CLASS)
    assert is_capture_worker(CaptureWorker)
    assert is_capture_worker(cloudpickle.dumps(CaptureWorker))
    for other in ("auto", None, dict, cloudpickle.dumps(dict), b"", b"no pickle"):
        assert not is_capture_worker(other)
