"""Keys of the weights in the engine core, against a small stand-in for vLLM's."""

import itertools
from types import SimpleNamespace

from midstream.runtime.core import vector_updates, weight_epochs
from midstream.runtime.core.prefix_cache import extra_keys
from midstream.runtime.protocol.codec import pack
from midstream.runtime.protocol.results import WeightState
from midstream.runtime.protocol.rpc import Acknowledged, AdapterLoads
from midstream.runtime.vllm.attributes import WEIGHT_KEY


class Executor:
    def __init__(self):
        self.number = self.loads = 0
        self.sent = []

    def collective_rpc(self, method, args, non_block=False):
        self.sent.append(args[0])
        answers = {"ReadWeights": WeightState(self.number), "CountLoads": AdapterLoads(self.loads)}
        return [pack(answers.get(args[0]["op"], Acknowledged()))] * 2


class Request:
    """A request whose hashes are made by the engine's hasher, received by the engine core."""

    numbers = itertools.count()

    def __init__(self, engine, adapter=None):
        self.request_id = str(next(self.numbers))
        self.lora_request, self.sampling_params = adapter, None
        self.num_computed_tokens, self.block_hashes = 0, []
        self._hasher = engine.request_block_hasher
        self.update_block_hashes()
        weight_epochs.renew_key(engine.scheduler.kv_cache_manager, self)

    def update_block_hashes(self):
        self.block_hashes += self._hasher(self)


def hashes(request):
    return [extra_keys(lambda *_: (None, 0), request, start, start + 4, 0)[0] for start in (0, 4)]


def made(reuse_bytes=0):
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=SimpleNamespace()),
        model_executor=Executor(),
        request_block_hasher=hashes,
        vllm_config=SimpleNamespace(
            additional_config={"midstream": {"reuse_bytes": reuse_bytes}},
        ),
    )
    vector_updates.prepare(engine)
    weight_epochs.prepare(engine)
    weight_epochs.prepare(engine)  # once
    return engine


def adapter(number, name="a", path="/a"):
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=path)


def test_without_a_change_hashes_are_vllms_own():
    engine = made()
    weight_epochs.after(lambda _: None, engine)
    weight_epochs.see_request(engine, Request(engine, adapter(1)))
    assert Request(engine).block_hashes == Request(engine, adapter(1)).block_hashes == [None, None]


def test_the_first_block_has_the_key_of_the_weights_from_a_change_on():
    engine = made()
    early = Request(engine)
    engine.model_executor.number = 3
    weight_epochs.after(lambda _: None, engine)
    late = Request(engine)
    assert late.block_hashes == [(("midstream", "weights 1.0"),), None]
    assert early.block_hashes == [None, None]
    # It fills its first blocks later: they stay those of the weights that it began with.
    assert hashes(early) == [None, None]
    manager = engine.scheduler.kv_cache_manager
    weight_epochs.renew_key(manager, early)
    assert early.block_hashes == late.block_hashes
    assert WEIGHT_KEY.get(early) == WEIGHT_KEY.get(late)


def test_vllms_function_that_hashes_a_request_in_each_step_is_its_own():
    assert made().request_block_hasher is hashes


def test_a_call_that_fails_may_have_changed_the_weights():
    engine = made()

    def fail(_engine):
        engine.model_executor.number = 1
        raise RuntimeError

    try:
        weight_epochs.after(fail, engine)
    except RuntimeError:
        assert Request(engine).block_hashes[0]
    else:
        raise AssertionError


def test_an_adapter_of_a_known_name_and_path_with_another_number_has_a_key_of_its_own():
    engine = made(reuse_bytes=1)
    first, second = adapter(1), adapter(2)
    weight_epochs.see_request(engine, Request(engine, first))
    weight_epochs.see_request(engine, Request(engine, adapter(7, "b", "/b")))
    assert engine.model_executor.sent == []
    weight_epochs.see_request(engine, Request(engine, second))
    assert [message["op"] for message in engine.model_executor.sent] == ["CountResets"]
    assert Request(engine, second).block_hashes[0] == (("midstream", "weights 0.1"),)
    assert Request(engine, adapter(7, "b", "/b")).block_hashes[0] is None
    assert Request(engine).block_hashes[0] is None


def test_an_adapter_that_was_removed_may_come_back_with_other_weights():
    engine = made()
    weight_epochs.see_request(engine, Request(engine, adapter(1)))
    weight_epochs.remove_lora(lambda *_: True, engine, 1)
    weight_epochs.see_request(engine, Request(engine, adapter(1)))
    assert Request(engine, adapter(1)).block_hashes[0] == (("midstream", "weights 0.1"),)


def test_rows_that_the_front_end_keeps_end_with_a_change():
    for reuse_bytes in (0, 1):
        engine = made(reuse_bytes)
        engine.model_executor.number = 1
        weight_epochs.see_weights(engine)
        weight_epochs.see_weights(engine)
        sent = [message["op"] for message in engine.model_executor.sent]
        assert sent.count("CountResets") == reuse_bytes


def test_workers_learn_the_name():
    engine, names = made(), []
    weight_epochs.hear_names(engine)  # this release has none
    engine.set_weight_version = names.append
    weight_epochs.hear_names(engine)
    engine.set_weight_version("step 7")
    assert names == ["step 7"]
    assert engine.model_executor.sent[0] == {"op": "NameWeights", "name": "step 7"}


def begin(engine, request):
    """Let a request begin; return the extra keys of its first block."""
    weight_epochs.see_request(engine, request)
    weight_epochs.renew_key(engine.scheduler.kv_cache_manager, request)
    return request.block_hashes[0]


def operations(engine):
    sent = [message["op"] for message in engine.model_executor.sent]
    engine.model_executor.sent.clear()
    return sent


def test_an_adapter_with_other_files_shares_nothing_until_workers_have_loaded_them(tmp_path):
    engine, file = made(reuse_bytes=1), tmp_path / "adapter_model.safetensors"
    mine = adapter(1, path=str(tmp_path))
    file.write_bytes(b"old")
    assert begin(engine, Request(engine, mine)) is None
    file.write_bytes(b"old")  # as when it is copied again
    (tmp_path / "optimizer.pt").write_bytes(b"new")
    assert begin(engine, Request(engine, mine)) is None
    assert operations(engine) == []
    file.write_bytes(b"new")
    first, second = Request(engine, mine), Request(engine, mine)
    assert len({begin(engine, first), begin(engine, second), None}) == 3
    counts = ["CountLoads", "CountResets", "CountLoads"]
    assert operations(engine) == [*counts, *counts[1:]]
    waiting = first.block_hashes[0]
    assert begin(engine, first) == waiting  # and asks for nothing more
    assert operations(engine) == []
    engine.model_executor.number = 1  # of another adapter
    assert begin(engine, Request(engine, mine)) not in (None, waiting, second.block_hashes[0])
    engine.model_executor.loads = 1
    shared = (("midstream", "weights 0.1"),)
    assert begin(engine, Request(engine, mine)) == shared
    assert operations(engine)[-2:] == ["CountResets", "CountLoads"]  # rows of those before it
    assert begin(engine, Request(engine, mine)) == shared
    assert operations(engine) == []


def test_an_adapter_that_a_call_loads_is_compared_with_what_it_was_loaded_from(tmp_path):
    engine, file = made(), tmp_path / "adapter_model.safetensors"
    mine = adapter(1, path=str(tmp_path))
    file.write_bytes(b"old")
    weight_epochs.add_lora(lambda *_: True, engine, mine)
    file.write_bytes(b"new")
    assert begin(engine, Request(engine, mine)) is not None
    # Removed, it is loaded again in any case.
    weight_epochs.remove_lora(lambda *_: True, engine, 1)
    assert begin(engine, Request(engine, mine)) == (("midstream", "weights 0.1"),)


def test_an_adapter_whose_files_are_elsewhere_has_the_key_of_its_number():
    engine = made()
    assert begin(engine, Request(engine, adapter(1, path="organisation/adapter"))) is None
    assert operations(engine) == []
