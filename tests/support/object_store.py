"""Object stores on this machine: one that speaks S3's protocol over HTTP, Google's, Azure's."""

import base64
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def object_server() -> Iterator[str]:
    """The URL of a server of the test run's own.

    It is in a process of its own: vLLM looks at every variable of every module when it starts on a
    CPU, and some of those of the server's libraries may not be looked at.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        # It ends with its input.
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def object_client(object_server: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=object_server,
        region_name=VARIABLES["AWS_DEFAULT_REGION"],
        aws_access_key_id=VARIABLES["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=VARIABLES["AWS_SECRET_ACCESS_KEY"],
    )


@pytest.fixture
def s3(object_server: str, object_client: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of that server, where all S3 is looked for while the test runs."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server)
    return object_client


@pytest.fixture
def bucket(s3: Any) -> str:
    """A new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["gs", "az"])
def other_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket of Google's emulator or of Azure's, where there is one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if request.param == "gs":
        emulator = pytest.importorskip("gcp_storage_emulator.server")
        fsspec = pytest.importorskip("gcsfs").core.fsspec
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
        server.start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        yield "gs://bucket"
        server.stop()
        return
    pytest.importorskip("adlfs")
    blob = pytest.importorskip("azure.storage.blob")
    command = shutil.which("azurite-blob") or pytest.skip("no azurite-blob (npm install azurite)")
    key = base64.b64encode(b"made up").decode()
    account = f"AccountName=tester;AccountKey={key};BlobEndpoint={url}/tester;"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}"
    )
    monkeypatch.setenv("AZURITE_ACCOUNTS", f"tester:{key}")
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen([command, *options, "--blobPort", str(port)]) as process:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.2)
        client = blob.BlobServiceClient.from_connection_string(
            f"DefaultEndpointsProtocol=http;{account}"
        )
        client.create_container("bucket")
        yield "az://bucket"
        process.terminate()
