"""`midstream studio` starts a server with Studio, waits for the page, and opens it."""

import json
import sys

import pytest
from support.command import CliRunner

from midstream.cli import serve, studio
from midstream.cli.app import app

pytestmark = pytest.mark.engine  # starts servers
# A server: it answers at the path of the page alone, then ends with a status.
SERVER = """
import sys, http.server
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/midstream/" else 404)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Page)
server.handle_request()
sys.exit(7)
"""


@pytest.fixture
def opened(monkeypatch):
    """Addresses that were opened, and the words that the server was started with."""
    found, words = [], []

    def command(model, given, rest, sinks=None):
        words[:] = [model, given, rest]
        return [sys.executable, "-c", SERVER, rest[-1]]

    monkeypatch.setattr(studio, "server_command", command)
    monkeypatch.setattr(studio.webbrowser, "open", lambda url: found.append(url) or True)
    return found, words


def run(*words):
    return CliRunner().invoke(app, ["studio", *words])


def test_the_page_is_opened_once_it_is_there_and_the_servers_status_is_the_commands(
    opened, unused_port
):
    result = run("--model", "m", "--port", str(unused_port), "--dtype", "float32")
    found, (model, given, rest) = opened
    url = f"http://127.0.0.1:{unused_port}/midstream/"
    assert found == [url]
    assert f"Studio: {url}" in result.stdout
    assert result.exit_code == 7
    assert (model, given) == ("m", {"http": {"studio": True}})
    assert rest == ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(unused_port)]


def test_without_a_browser_the_address_is_shown_alone(opened, unused_port):
    result = run("--model", "m", "--port", str(unused_port), "--no-browser")
    assert opened[0] == []
    assert f"127.0.0.1:{unused_port}/midstream/" in result.stdout


def test_a_server_that_ends_first_ends_the_command(opened, monkeypatch, unused_port):
    ends = [sys.executable, "-c", "import sys; sys.exit(3)"]
    monkeypatch.setattr(studio, "server_command", lambda *_: ends)
    result = run("--model", "m", "--port", str(unused_port))
    assert (result.exit_code, opened[0]) == (3, [])


def test_settings_and_vectors_are_kept(opened, unused_port, tmp_path):
    vectors = tmp_path / "h.safetensors"
    vectors.touch()
    settings = json.dumps({"sites": ["resid_post"], "http": {"admin": False}})
    run("--model", "m", "--port", str(unused_port), "--settings", settings,
        "--vectors", f"happy={vectors}")  # fmt: skip
    assert opened[1][1] == {
        "sites": ["resid_post"],
        "http": {"admin": False, "studio": True},
        "vectors": {"happy": str(vectors)},
    }
    assert run("--model", "m", "--settings", '{"http": false}').exit_code == 2


def test_the_command_is_that_of_serve(monkeypatch):
    monkeypatch.setattr(serve, "_server", lambda model, rest: ["server", model])
    words = serve.server_command("m", {"http": {"studio": True}}, ["--port", "1"])
    assert words[1:5] == ["-m", "server", "m", "--port"]
    config = json.loads(words[words.index("--additional-config") + 1])
    assert config == {"midstream": {"http": {"studio": True}}}


@pytest.fixture
def unused_port():
    from support.serving import free_port

    return free_port()
