"""`midstream guard …` does what the clients do, against a fake server."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.command import CliRunner
from support.serving_fake import WIDTH, Site, make
from unit.client.both import KINDS, Both

from midstream import Probe, client
from midstream.cli.app import app
from midstream.errors import ServerError, SpecError
from midstream.plan import ProbeInfo

PROBE = Probe([1.0] * WIDTH, layer=1)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.delenv("MIDSTREAM_ADMIN_KEY", raising=False)
    made = asyncio.run(make())
    real = client.Client

    def connect(url: str, **keys: Any) -> Any:
        assert keys == {"api_key": None, "admin_key": None}
        return real(http=TestClient(made.app, url.replace("127.0.0.1", "localhost")))

    monkeypatch.setattr(client, "Client", connect)
    yield made
    made.server.close()


def run(*words: str) -> str:
    found = CliRunner().invoke(app, ["guard", *words])
    assert found.exit_code == 0, found.output
    return str(found.output)


def test_a_guard_is_put_promoted_rolled_back_and_deleted_by_the_command(site, tmp_path):
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(PROBE.to_dict()))
    line = run("put", "toxic", str(file), "--above", "2", "--for", "3", "--share", "0.5")
    assert line.startswith("toxic version 1: shadow above 2, put by testclient at 20")
    (guard,) = site.engine.guards.active()
    assert guard.probe.replace(name="probe", act=None) == PROBE
    assert (guard.definition.condition.for_, guard.definition.scope.share) == (3, 0.5)
    assert "version 2: flag" in run("promote", "toxic")
    assert "version 3: shadow" in run("rollback", "toxic", "--to", "1")
    assert len(run("history", "toxic").splitlines()) == 3
    assert json.loads(run("list", "--json"))[0]["version"] == 3
    shown = json.loads(run("get", "toxic", "--full"))
    assert shown["probe"] == PROBE.to_dict()
    assert "direction" not in run("get", "toxic")
    assert run("delete", "toxic") == "toxic is deleted\n"
    assert run("list") == "no guards\n"
    assert "version 4: delete by" in run("history", "toxic")
    PROBE.to_folder(tmp_path)
    words = "--action", "stop", "--message", "No.", "--visible"
    assert "version 5: stop" in run("put", "toxic", str(tmp_path), "--above", "2", *words)


def test_a_guard_is_put_from_the_file_of_a_probe(site, tmp_path):
    file = tmp_path / "probe.safetensors"
    PROBE.with_info(ProbeInfo(model="org/fake", width=WIDTH, num_layers=4)).save(file)
    assert "version 1: shadow above 2" in run("put", "toxic", str(file), "--above", "2")
    (guard,) = site.engine.guards.active()
    assert guard.probe.replace(name="probe", act=None) == PROBE


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (ProbeInfo(model="org/other"), "was fitted on org/other .* engine runs fake"),
        (
            ProbeInfo(model="org/fake", width=WIDTH + 1),
            r"width 4, unknown layers.*width 3, 4 la",
        ),
        (ProbeInfo(num_layers=5), r"unknown, 5 layers.*\(width 3, 4 layers"),
    ],
)
def test_a_probe_of_another_model_becomes_no_guard(site, tmp_path, info, said):
    file = tmp_path / "probe.safetensors"
    PROBE.with_info(info).save(file)
    found = CliRunner().invoke(app, ["guard", "put", "toxic", str(file), "--above", "2"])
    assert found.exit_code == 2
    assert re.search(said, " ".join(found.output.split()))
    assert run("list") == "no guards\n"


def test_a_probe_s_file_of_another_format_is_refused(site, tmp_path):
    file = tmp_path / "probe.npz"
    file.write_bytes(b"")
    found = CliRunner().invoke(app, ["guard", "put", "toxic", str(file), "--above", "2"])
    assert found.exit_code == 2
    assert ".safetensors or .json" in " ".join(found.output.split())


def test_a_guard_by_the_name_of_vectors_and_one_with_a_first_stage(site):
    site.engine.vectors.register("mood", {1: [1.0] * WIDTH})
    run("put", "cheap", "mood", "--below", "-1.5", "--model", "fake")
    run("put", "dear", "--action", "webhook", "--webhook", "http://127.0.0.1:9/x",
        "--when", '{"guard": "cheap"}')  # fmt: skip
    cheap, dear = site.engine.guards.active()
    assert (cheap.definition.condition.below, cheap.definition.scope.models) == (-1.5, ("fake",))
    assert dear.definition.when.guard == "cheap"
    run("put", "judge", "mood", "--above", "1", "--when", '{"guard": "cheap"}',
        "--if-unavailable", "pass")  # fmt: skip
    assert site.engine.guards.active()[-1].definition.if_unavailable == "pass"
    run("delete", "judge")
    edits = json.dumps([{"op": "steer", "vector": {"name": "mood"}, "layer": 1}])
    run("put", "calm", "mood", "--above", "1", "--action", "switch", "--edits", edits)
    assert site.engine.guards.active()[0].probe.act.edits[0].op == "steer"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["put", "toxic", "unknown", "--above", "1"], "no vectors are registered as"),
        (["promote", "toxic"], "there is no guard"),
        (["get", "toxic"], "there is no guard"),
        (["put", "a b", "--above", "1"], "name"),
    ],
)
def test_what_the_server_rejects_is_an_error_of_the_command(site, words, said):
    found = CliRunner().invoke(app, ["guard", *words])
    assert found.exit_code == 2
    assert said in found.output


def test_a_server_that_is_not_there_is_said():
    found = CliRunner().invoke(app, ["guard", "list", "--url", "http://127.0.0.1:9"])
    assert found.exit_code == 2
    assert "is a server there?" in found.output


def test_each_command_has_help_with_an_example():
    from midstream.cli.guard import COMMANDS

    for name in COMMANDS:
        shown = CliRunner().invoke(app, ["guard", name, "--help"])
        assert f"Example: midstream guard {name} " in shown.output
        assert "bool" not in shown.output


@pytest.mark.parametrize("kind", KINDS)
def test_both_clients_have_guards(kind):
    made = asyncio.run(make())
    both = Both(kind, made)
    try:
        assert both.call("guards.put", "toxic", PROBE, above=1.0, for_=2)["version"] == 1
        for value in (np.ones(4), 3):
            with pytest.raises(
                SpecError, match="probe: expected Probe.vector, layer=14., its dict"
            ):
                both.call("guards.put", "toxic", value, above=1.0)
        assert both.call("guards.promote", "toxic")["action"] == "flag"
        assert both.call("guards.rollback", "toxic")["version"] == 3
        assert both.call("guards.rollback", "toxic", 2)["action"] == "flag"
        assert both.call("guards.show", "toxic", full=True)["probe"] == PROBE.to_dict()
        assert [one["name"] for one in both.call("guards.list")] == ["toxic"]
        assert len(both.call("guards.history", "toxic")) == 4
        other = PROBE.with_info(ProbeInfo(model="other"))
        with pytest.raises(SpecError, match="^probe: the probe was fitted on other"):
            both.call("guards.put", "toxic", other, above=1.0)
        both.call("guards.remove", "toxic")
        with pytest.raises(ServerError) as caught:
            both.call("guards.show", "toxic")
        assert caught.value.status == 404
    finally:
        both.close()
        made.server.close()
