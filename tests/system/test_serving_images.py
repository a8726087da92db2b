"""Images in requests to a server: `data:` URLs, selected by number, and in messages by role."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import serving, vision
from support.serving import Running

from midstream import Capture, Client, Image, Probe
from midstream.client import ServerError

VECTOR = torch.randn(vision.HIDDEN, generator=torch.Generator().manual_seed(3))
LAYER = 2
SHORT = {"max_tokens": 1, "temperature": 0}
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


def chat(system: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": "what is "}, vision.url_part(1)]},
        {"role": "assistant", "content": "an owl"},
        {
            "role": "user",
            "content": [vision.url_part(2), {"type": "text", "text": "and there?"}],
        },
    ]


@pytest.mark.parametrize("system", ["be terse", LONG])
def test_images_and_messages_with_images_are_selected(server, path, system):
    selected = {
        "first": {"image": 0},
        "every": {"image": "all"},
        "said": {"role": "assistant", "message": 0},
        "asked": {"role": "user", "message": -1},
        "text": {"text": "and there?"},
    }
    probes = [Probe(VECTOR, LAYER, name=name, positions=one) for name, one in selected.items()]
    with Client(server.url) as client:
        output = client.chat(
            chat(system), **SHORT, probes=probes, capture=Capture([LAYER], positions=Image(1))
        )
    scores = output.probes
    positions = {name: scores.positions_of(name).tolist() for name in selected}
    oracle = vision.VisionOracle("qwen3vl", path)
    image = vision.MODELS["qwen3vl"].mark
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nwhat is {image}<|im_end|>\n"
        f"<|im_start|>assistant\nan owl<|im_end|>\n<|im_start|>user\n{image}and there?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    inputs = oracle.inputs(text, [vision.picture(1), vision.picture(2)])
    places = oracle.media_tokens(inputs)
    rows, _ = oracle.run(inputs)
    wanted = rows["resid_post", LAYER][places] @ VECTOR
    assert positions["every"] == places
    torch.testing.assert_close(scores["every"], wanted, atol=1e-3, rtol=1e-3)
    count = len(positions["first"])
    assert positions["first"] == places[:count]
    assert 0 < count < len(places)
    ids = inputs["input_ids"][0].tolist()
    # The second image, with the marks of its ends, and the text after it.
    tail = hf.AutoTokenizer.from_pretrained(path)("<|im_end|>\n<|im_start|>assistant\n")
    begin, end = places[count] - 1, len(ids) - len(tail["input_ids"])
    assert positions["asked"] == list(range(begin, end))
    assert positions["text"] == list(range(places[-1] + 2, end))
    assert len(positions["said"]) == len("an owl") - 1
    assert max(positions["said"]) < begin
    # The client is told where the images are whose rows it got.
    first, second = output.activations.positions_of_media
    assert (first.kind, first.index, second.kind, second.index) == ("image", 0, "image", 1)
    assert output.activations.positions.tolist() == places[count:]
    assert (second.first, second.length) == (places[count], len(places) - count)
    assert first.first + first.length < second.first


def test_an_image_that_the_request_lacks_is_refused(server):
    with Client(server.url) as client:
        for where, problem in (
            ({"image": 2}, "image 2 is out of range: the prompt has 2 of this kind"),
            ({"audio": 0}, "the prompt has no audio; it has image"),
        ):
            capture = Capture([LAYER], positions=where)
            with pytest.raises(ServerError, match=problem) as caught:
                client.chat(chat("be terse"), **SHORT, capture=capture)
            assert caught.value.status == 400
