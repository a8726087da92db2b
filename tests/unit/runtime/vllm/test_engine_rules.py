"""Unsupported engine settings are rejected by name; all others pass."""

import sys
from types import SimpleNamespace

import pytest

from midstream.errors import UnsupportedError
from midstream.runtime.vllm.engine_rules import (
    HIDDEN_STATE_READERS,
    RULES,
    SPECULATION,
    check_settings,
)


def config(**changes):
    """A VllmConfig that every rule finds nothing in, with fields set by dotted path (`__`)."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            prefill_context_parallel_size=1,
            use_sequence_parallel_moe=False,
            distributed_executor_backend="mp",
            enable_elastic_ep=False,
        ),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        model_config=SimpleNamespace(is_encoder_decoder=False, enforce_eager=True),
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0)),
        additional_config={"midstream": {}},
        speculative_config=None,
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *holders, name = path.split("__")
        holder = made
        for one in holders:
            holder = getattr(holder, one)
        setattr(holder, name, value)
    return made


class Connector:
    """What vLLM's connectors have, of which those that bring KV override some."""

    def get_num_new_matched_tokens(self):
        return 0, False

    def start_load_kv(self):
        pass

    def wait_for_layer_load(self):
        pass


class Reader(Connector):
    pass


Reader.__module__, _, Reader.__qualname__ = HIDDEN_STATE_READERS[0].partition(":")


class Faster(Reader):
    def save_kv_layer(self):
        pass


class Loading(Reader):
    def start_load_kv(self):
        pass


class SameName(Connector):
    pass


SameName.__qualname__ = Reader.__qualname__


class Factory:
    """Stands in for vLLM's."""

    @staticmethod
    def get_connector_class(transfer):
        classes = {"Faster": Faster, "Loading": Loading, "SameName": SameName, "Nixl": Connector}
        if transfer.kv_connector == "Missing":
            raise ImportError("No module named 'hs_connectors'")
        return {**classes, "Reader": Reader}.get(transfer.kv_connector, Connector)


class Transfer(SimpleNamespace):
    """A KVTransferConfig."""

    def __init__(self, kv_connector, inner=(), kv_connector_module_path=None, **more):
        if inner:
            more["kv_connector_extra_config"] = {"connectors": [{"kv_connector": x} for x in inner]}
        path = kv_connector_module_path
        super().__init__(kv_connector=kv_connector, kv_connector_module_path=path, **more)


# What switches each rule on, by the setting that it names.
REFUSED = {
    "enable_dbo": {"parallel_config__use_ubatching": True},
    "prefill_context_parallel_size > 1": {"parallel_config__prefill_context_parallel_size": 2},
    "kv_sharing_fast_prefill": {"cache_config__kv_sharing_fast_prefill": True},
    "sequence-parallel mixture of experts": {"parallel_config__use_sequence_parallel_moe": True},
    "compilation_config.pass_config.enable_sp": {
        "compilation_config__pass_config__enable_sp": True
    },
    'additional_config["decode_backend"] = "latency_specialized"': {
        "additional_config": {"midstream": {}, "decode_backend": "latency_specialized"}
    },
    'speculative_config["method"] other than ngram, ngram_gpu, draft_model, eagle, eagle3, mtp, '
    "medusa, mlp_speculator, extract_hidden_states": {
        "speculative_config": SimpleNamespace(method="suffix")
    },
    'speculative_config["enable_adaptive_verification"]': {
        "speculative_config": SimpleNamespace(method="eagle", enable_adaptive_verification=True)
    },
    "kv_transfer_config of a connector that brings KV": {
        "kv_transfer_config": SimpleNamespace(kv_connector="x", kv_connector_module_path=None)
    },
    'distributed_executor_backend other than "uni", "mp", and "ray" as vLLM has it by default '
    "(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1)": {
        "parallel_config__distributed_executor_backend": "external_launcher"
    },
    'midstream.tapped_model = "lazy" with data parallelism': {
        "parallel_config__data_parallel_size": 2,
        "additional_config": {"midstream": {"tapped_model": "lazy"}},
    },
    'midstream.hooks = "local" with speculative_config': {
        "additional_config": {"midstream": {"hooks": "local"}},
        "speculative_config": SimpleNamespace(method="eagle", enable_adaptive_verification=False),
    },
    'midstream.hooks = "local" without enforce_eager': {
        "additional_config": {"midstream": {"hooks": "local"}},
        "model_config__enforce_eager": False,
    },
    'midstream.tapped_model = "exact" without VLLM_BATCH_INVARIANT=1 on a GPU': {
        "additional_config": {"midstream": {"tapped_model": "exact"}},
    },
    "enable_elastic_ep": {"parallel_config__enable_elastic_ep": True},
    "an encoder-decoder model": {"model_config__is_encoder_decoder": True},
    "cpu_offload_gb with UVA switched off": {"offload_config__uva__cpu_offload_gb": 4},
}


@pytest.fixture(autouse=True)
def envs(monkeypatch):
    """Stands in for `vllm.envs`, with UVA switched off."""
    found = SimpleNamespace(VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=True)
    package = SimpleNamespace(envs=found, __path__=[])
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.envs", found)
    monkeypatch.setitem(sys.modules, "vllm.utils", SimpleNamespace(__path__=[]))
    platform = SimpleNamespace(is_uva_available=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.utils.platform_utils", platform)
    factory = SimpleNamespace(KVConnectorFactory=Factory)
    path = "vllm.distributed.kv_transfer.kv_connector"
    for name in ("vllm.distributed", "vllm.distributed.kv_transfer", path):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, f"{path}.factory", factory)
    return found


def test_ordinary_settings_pass():
    check_settings(config())


def test_every_rule_has_a_case_here():
    assert set(REFUSED) == {rule.setting for rule in RULES}
    assert len(RULES) == len(REFUSED)


@pytest.mark.parametrize("setting", REFUSED)
def test_each_rule_fires_alone_and_names_its_setting_and_reason(setting):
    given = config(**REFUSED[setting])
    assert [rule.setting for rule in RULES if rule.found(given)] == [setting]
    with pytest.raises(UnsupportedError) as caught:
        check_settings(given)
    reason = next(rule.reason for rule in RULES if rule.setting == setting)
    assert f"\n  {setting}: {reason}" in str(caught.value)
    assert "remove `midstream` from additional_config" in str(caught.value)


def test_all_that_is_wrong_is_named_at_once():
    changes = {path: value for one in REFUSED.values() for path, value in one.items()}
    both = SimpleNamespace(method="dspark", enable_adaptive_verification=True)
    changes["speculative_config"] = both
    changes["additional_config"] = {
        "midstream": {"tapped_model": "lazy", "hooks": "local"},
        "decode_backend": "latency_specialized",
    }
    with pytest.raises(UnsupportedError) as caught:
        check_settings(config(**changes))
    # A tapped model is either lazy or exact.
    assert len(str(caught.value).splitlines()) == 1 + len(RULES) - 1


@pytest.mark.parametrize(
    ("device", "variable", "starts"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_exact_results_need_batch_invariance_which_a_cpu_has_not(envs, device, variable, starts):
    envs.VLLM_BATCH_INVARIANT = variable
    made = config(additional_config={"midstream": {"tapped_model": "exact"}})
    made.device_config = SimpleNamespace(device_type=device)
    if starts:
        check_settings(made)
    else:
        with pytest.raises(UnsupportedError, match='set the variable, or use "always"'):
            check_settings(made)


NEW = """
    parallel_config.use_ubatching parallel_config.prefill_context_parallel_size
    parallel_config.use_sequence_parallel_moe parallel_config.enable_elastic_ep
    cache_config.kv_sharing_fast_prefill compilation_config.pass_config.enable_sp
    model_config.is_encoder_decoder offload_config.uva offload_config kv_transfer_config
"""


@pytest.mark.parametrize("path", NEW.split())
def test_a_release_that_has_not_got_a_setting_yet_passes(path):
    given = holder = config()
    *holders, name = path.split(".")
    for part in holders:
        holder = getattr(holder, part)
    delattr(holder, name)
    check_settings(given)


@pytest.mark.parametrize("backend", [None, "uni", "mp", "ray"])
def test_executors_that_answer_calls_between_steps_pass(backend):
    check_settings(config(parallel_config__distributed_executor_backend=backend))


def test_rays_first_executor_and_those_of_ones_own_are_refused(envs):
    class Own:
        pass

    with pytest.raises(UnsupportedError, match="during a step"):
        check_settings(config(parallel_config__distributed_executor_backend=Own))
    envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND = False
    with pytest.raises(UnsupportedError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"):
        check_settings(config(parallel_config__distributed_executor_backend="ray"))


@pytest.mark.parametrize("method", SPECULATION)
def test_drafting_that_leaves_the_models_forward_alone_passes(method):
    check_settings(config(speculative_config=SimpleNamespace(method=method)))


@pytest.mark.parametrize("method", ["suffix", "custom_class", "dflash", "dspark", None])
def test_other_ways_of_drafting_are_refused(method):
    with pytest.raises(UnsupportedError, match="method.* other than ngram, .*mlp_speculator"):
        check_settings(config(speculative_config=SimpleNamespace(method=method)))


@pytest.mark.parametrize(
    "transfer", [Transfer(None), Transfer("Reader"), Transfer("Faster"),
                 Transfer("MultiConnector", ["Reader", "Faster"])]
)  # fmt: skip
def test_connectors_that_only_read_hidden_states_pass(transfer):
    check_settings(config(kv_transfer_config=transfer))


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        (Transfer("Nixl"), "got Nixl"),
        (Transfer("SameName"), "got SameName"),
        (Transfer("Loading"), "got Loading, which has its own start_load_kv"),
        (Transfer("MultiConnector", ["Reader", "Nixl"]), "got Nixl, in a MultiConnector"),
        (Transfer("MultiConnector", kv_connector_module_path="own"), "got MultiConnector"),
        (Transfer("Missing"), "got Missing, which cannot be imported .*hs_connectors"),
    ],
)
def test_connectors_that_may_bring_kv_are_refused_by_name(transfer, said):
    with pytest.raises(UnsupportedError, match=f"ExampleHiddenStatesConnector.*; {said}"):
        check_settings(config(kv_transfer_config=transfer))


def test_offloading_is_fine_where_uva_is_on(envs):
    envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA = False
    check_settings(config(offload_config__uva__cpu_offload_gb=4))
    del envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    check_settings(config(offload_config__uva__cpu_offload_gb=4))


def test_offloading_is_refused_on_a_machine_without_uva(envs):
    envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA = False
    sys.modules["vllm.utils.platform_utils"].is_uva_available = lambda: False
    check_settings(config())
    with pytest.raises(UnsupportedError, match="cpu_offload_gb .*run its tap twice"):
        check_settings(config(offload_config__uva__cpu_offload_gb=4))


@pytest.mark.parametrize("value", [None, {}, {"decode_backend": "default"}, object()])
def test_other_plugins_settings_pass(value):
    check_settings(config(additional_config=value))
