"""Images in requests to a server: `data:` URLs, selected by number, and in messages by role."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers as hf
from support import serving, vision
from support.serving import NAME, Running

from midstream import Capture, Client, Image

VECTOR = torch.randn(vision.HIDDEN, generator=torch.Generator().manual_seed(3))
LAYER = 2
LONG = "the " * 1100  # a plan for so many tokens is prepared before the engine has the request


@pytest.fixture(scope="module")
def path(tiny_models: Path) -> Path:
    return vision.make("qwen3vl", tiny_models)


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ["--max-model-len=2048", '--limit-mm-per-prompt={"image": 2}']
    arguments = serving.command(vision.served(path), *options)
    with serving.running(arguments, tmp_path_factory.mktemp("images")) as running:
        yield running


def url(seed: int) -> dict[str, Any]:
    data = io.BytesIO()
    vision.picture(seed).save(data, "PNG")
    text = base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def chat(system: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": "what is "}, url(1)]},
        {"role": "assistant", "content": "an owl"},
        {"role": "user", "content": [url(2), {"type": "text", "text": "and there?"}]},
    ]


def ask(server: Running, system: str, **positions: Any) -> httpx.Response:
    probes = [
        {"direction": VECTOR.tolist(), "layer": LAYER, "name": name, "positions": where}
        for name, where in positions.items()
    ]
    body = {
        "model": NAME,
        "messages": chat(system),
        "max_tokens": 1,
        "temperature": 0,
        "midstream": {"probes": probes},
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


@pytest.mark.parametrize("system", ["be terse", LONG])
def test_images_and_messages_with_images_are_selected(
    server: Running, path: Path, system: str
) -> None:
    answer = ask(
        server,
        system,
        first={"image": 0},
        every={"image": "all"},
        said={"role": "assistant", "message": 0},
        asked={"role": "user", "message": -1},
        text={"text": "and there?"},
    )
    assert answer.status_code == 200, answer.text
    scores = answer.json()["midstream"]["probes"]
    oracle = vision.VisionOracle("qwen3vl", path)
    image = vision.MODELS["qwen3vl"].mark
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nwhat is {image}<|im_end|>\n"
        f"<|im_start|>assistant\nan owl<|im_end|>\n<|im_start|>user\n{image}and there?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    inputs = oracle.inputs(text, [vision.picture(1), vision.picture(2)])
    places = oracle.image_tokens(inputs)
    rows, _ = oracle.run(inputs)
    wanted = rows["resid_post", LAYER][places] @ VECTOR
    assert scores["every"]["positions"] == places
    assert torch.allclose(torch.tensor(scores["every"]["scores"]), wanted, atol=1e-3, rtol=1e-3)
    count = len(scores["first"]["positions"])
    assert scores["first"]["positions"] == places[:count]
    assert 0 < count < len(places)
    ids = inputs["input_ids"][0].tolist()
    # The second image, with the marks of its ends, and the text after it.
    tail = hf.AutoTokenizer.from_pretrained(path)("<|im_end|>\n<|im_start|>assistant\n")
    begin, end = places[count] - 1, len(ids) - len(tail["input_ids"])
    assert scores["asked"]["positions"] == list(range(begin, end))
    assert scores["text"]["positions"] == list(range(places[-1] + 2, end))
    assert len(scores["said"]["positions"]) == len("an owl") - 1
    assert max(scores["said"]["positions"]) < begin


def test_a_client_gets_rows_of_an_image_and_where_it_is(server: Running, path: Path) -> None:
    capture = Capture([LAYER], positions=Image(1))
    with Client(server.url) as client:
        output = client.chat(chat("be terse"), max_tokens=1, temperature=0, capture=capture)
    assert output.activations is not None
    places = output.activations.positions.tolist()
    first, second = output.activations.positions_of_media
    assert (first.kind, first.index, second.kind, second.index) == ("image", 0, "image", 1)
    assert places == list(range(second.first, second.first + second.length))
    assert first.first + first.length < second.first


def test_an_image_that_the_request_lacks_is_refused(server: Running) -> None:
    answer = ask(server, "be terse", third={"image": 2})
    assert answer.status_code == 400
    assert "image 2 is out of range: the prompt has 2 of this kind" in answer.text
    answer = ask(server, "be terse", sound={"audio": 0})
    assert answer.status_code == 400
    assert "the prompt has no audio; it has image" in answer.text
