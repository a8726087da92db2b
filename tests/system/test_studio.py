"""Studio on a real server: a fit, an answer coloured by it, a steered answer, a lens, a sweep."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import serving
from support.chromium import chromium
from support.serving import Running
from support.studio_page import steer

from midstream import Client

PAIRS = (
    ("I feel wonderful today.", "I feel terrible today."),
    ("What a lovely surprise this is!", "What an awful mess this is!"),
    ("The news made me so happy.", "The news made me so sad."),
    ("It was the best day of my life.", "It was the worst day of my life."),
)
POSITIVE, NEGATIVE = ([pair[nth] for pair in PAIRS] for nth in (0, 1))
MINUTE = 60_000


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = serving.settings(http={"studio": True}, sites=["resid_pre", "resid_post"])
    folder = tmp_path_factory.mktemp("studio")
    with serving.running(serving.command(smollm2, settings), folder) as made:
        yield made


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with chromium() as browser:
        made = browser.new_page()
        made.set_default_timeout(MINUTE)
        yield made


@pytest.mark.nightly  # the views are tested on a fake server by default, in tests/browser
@pytest.mark.model
def test_what_studio_shows_is_what_the_client_gets(server: Running, page: Any) -> None:
    drive(page, server.url)


def drive(page: Any, url: str) -> None:
    client = Client(url)
    page.goto(f"{url}/midstream/#/library?name=mood")
    page.get_by_label("Positive texts").fill("\n".join(POSITIVE))
    page.get_by_label("Negative texts").fill("\n".join(NEGATIVE))
    page.get_by_role("button", name="Fit and register").click()
    page.locator("table.auc tbody tr").first.wait_for()
    found = client.fit(POSITIVE, NEGATIVE)
    shown = np.array(page.locator("table.auc td:nth-child(3)").all_text_contents(), float)
    wanted_auc = [found.scores[layer].auc for layer in found.layers]
    assert np.allclose(shown, wanted_auc, atol=6e-4)  # three digits
    best = found.best_layer
    assert page.locator("table.auc tr.best th").text_content() == str(best)

    page.get_by_role("link", name="Colour a chat").click()
    page.get_by_role("heading", name="Chat").wait_for()
    page.goto(f"{page.url}&max=24")
    page.get_by_label("Message").fill("Tell me about a sad day.")
    page.keyboard.press("Enter")
    page.locator("article.assistant:not([aria-busy]) .t").first.wait_for()
    page.get_by_role("button", name="Send").wait_for()
    messages = [{"role": "user", "content": "Tell me about a sad day."}]
    asked = {"model": client.call("GET", "/v1/models")["data"][0]["id"], "temperature": 0}
    probe = found[best].probe("mood", positions="generated")
    wanted = client.chat(messages, max_tokens=24, probes=probe, **asked)
    text = page.locator("article.assistant .tokens").text_content()
    assert text == wanted.text
    scores = wanted.probes["mood"].numpy()
    read = []
    for nth in range(8):
        page.locator("article.assistant .t").nth(nth).click()
        line = page.locator(".readout").text_content()
        read.append(float(re.search(r"mood (\S+)", line)[1].replace("−", "-")))
    assert np.allclose(read, scores[:8], rtol=0.01, atol=0.005)

    page.goto(
        f'{url}/midstream/#/steer?prompt=How was your day?&max=12&show=two&v=[["mood",{best},1.5]]'
    )
    panes = steer(page, 2, MINUTE)
    assert panes.locator(".pane-foot").nth(1).text_content().startswith("steered at ")
    day = [{"role": "user", "content": "How was your day?"}]
    steered = client.chat(day, max_tokens=12, steer=found[best].steer(1.5), **asked)
    texts = panes.locator(".tokens").all_text_contents()
    assert texts == [client.chat(day, max_tokens=12, **asked).text, steered.text]

    page.goto(f"{url}/midstream/#/layers?prompt=The capital of France is")
    page.locator(".grid td.known").first.wait_for()
    assert page.locator('.grid td[data-at="0,4"]').text_content() == " Paris"

    page.goto(
        f"{url}/midstream/#/patching?prompt=The capital of Japan is&"
        "source=The capital of France is&answer=%22 Paris%22&other=%22 Tokyo%22&site=resid_pre"
    )
    page.get_by_role("button", name="Patch every cell").click()
    page.get_by_text("noise floor 0").wait_for()
    page.locator('.grid td[data-at="29,3"]').click()  # layer 0, " Japan": the whole difference
    assert "100 % recovered" in page.locator(".readout").text_content()
    page.get_by_text("Code of this view").click()
    code = page.get_by_label("Code", exact=True).text_content()
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(compile(code, "studio", "exec"), names)
    assert names["sweep"].best(1)[0] is not None
