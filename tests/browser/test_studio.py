"""Studio in Chromium on a scripted server: views, links, keys, hostile text, keyboard, phone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from support.chromium import sync_api
from support.studio_page import answer, answered, link, say, steer, steered, with_vector
from support.studio_server import HOSTILE

expect = sync_api().expect


def test_an_answer_streams_and_each_token_shows_its_probability(page, server):
    answered(page, server, "How was it?")
    assert answer(page).locator(".tokens").text_content() == "The day is fine, and the sky is blue."
    answer(page).locator(".t").nth(3).hover()
    expect(answer(page).locator(".readout")).to_contain_text("“␣fine”  probability 100 %")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "How was it?"}]
    assert "midstream" not in server.bodies[0]


def test_tokens_are_coloured_by_a_vector_whose_scores_are_those_of_their_positions(page, server):
    with_vector(server)
    answered(page, server, color="vector", vector="mood", layer=2)
    [body] = server.bodies
    assert body["midstream"] == {
        "probes": [
            {"direction": {"name": "mood"}, "layer": 2, "name": "color", "positions": ["generated"]}
        ]
    }  # fmt: skip
    # The server's score of position p is sin(p) + layer, and the answer starts at position 3.
    for nth, shown in ((0, "2.14"), (4, "2.66"), (8, "1")):
        answer(page).locator(".t").nth(nth).click()
        expect(answer(page).locator(".readout")).to_contain_text(f"mood {shown} ")
    assert answer(page).locator(".t.pos").count() > 2
    assert answer(page).locator(".t.neg").count() > 2


@pytest.mark.nightly
def test_tokens_are_coloured_by_a_lens_with_what_it_would_say_next(page, server):
    answered(page, server, color="lens", layer=1)
    answer(page).locator(".t").first.hover()
    expect(answer(page).locator(".readout")).to_contain_text("next: “a” 60.7 %, “b” 22.3 %")
    assert server.bodies[0]["midstream"]["capture"][0]["layers"] == [1]
    answered(page, server, color="lens", layer=1, word=" Paris")
    answer(page).locator(".t").first.hover()
    expect(answer(page).locator(".readout")).to_contain_text("“␣Paris” 36.8 % at layer 1")


@pytest.mark.nightly
def test_another_colouring_recolours_answers_whose_scores_are_there_and_else_says_why_not(
    page, server
):
    with_vector(server)
    page.goto(link(server, color="vector", vector="mood", layer=2))
    say(page, "abc")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_label("Colour tokens by").select_option("surprise")
    answer(page).locator(".t").nth(3).click()
    expect(answer(page).locator(".readout")).to_have_text("“␣fine”  probability 100 %")
    page.get_by_label("Colour tokens by").select_option("vector")
    expect(answer(page).locator(".readout")).to_contain_text("mood 1.72 ")
    page.get_by_label("Layer").select_option("1")
    expect(answer(page)).to_contain_text("Not scored by “mood, layer 1” when it was written")
    expect(answer(page).locator(".readout")).to_contain_text("mood 1.72 ")
    answer(page).get_by_role("button", name="Answer again").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("article.assistant")).to_have_count(1)
    answer(page).locator(".t").nth(3).click()
    expect(answer(page).locator(".readout")).to_contain_text("mood 0.721 ")
    assert len(server.bodies) == 2
    page.get_by_label("Colour tokens by").select_option("none")
    expect(answer(page).locator(".readout")).to_be_hidden()
    assert answer(page).locator(".t.pos, .t.neg").count() == 0


@pytest.mark.nightly
def test_tokens_are_coloured_by_a_feature(page, server):
    answered(page, server, color="feature", sae="layer-1", feature=7)
    answer(page).locator(".t").first.hover()
    expect(answer(page).locator(".readout")).to_contain_text("feature 7: 3")
    assert server.bodies[0]["midstream"]["capture"][0]["features"] == [7]


@pytest.mark.nightly
def test_a_link_has_the_conversation_and_the_settings(page, server, browser):
    answered(page, server, "First?", color="confidence", max=33, system="Be brief.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    other = browser.new_page()
    other.goto(page.url)
    expect(other.locator("article")).to_have_count(2)
    assert other.locator("article.assistant .tokens").text_content().startswith("The day is fine")
    other.get_by_role("button", name="Answer again, coloured").click()
    expect(other.locator("article.assistant .t")).to_have_count(11)
    other.close()
    assert [body["max_tokens"] for body in server.bodies] == [33, 33]
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?"},
    ]


def test_a_reload_in_the_middle_keeps_what_was_written_and_offers_to_go_on(page, server):
    page.goto(link(server))
    say(page, "hold on")
    expect(answer(page).locator(".t")).to_have_count(5)
    page.reload()
    expect(answer(page)).to_contain_text("cut off when the page was reloaded")
    expect(answer(page).locator(".said")).to_have_text("The day is fine,")
    server.release.set()
    answer(page).get_by_role("button", name="Answer again").click()
    expect(answer(page).locator(".t")).to_have_count(11)
    assert len(server.bodies) == 2


@pytest.mark.nightly
def test_stop_keeps_what_was_written(page, server):
    page.goto(link(server))
    say(page, "hold on")
    expect(answer(page).locator(".t")).to_have_count(5)
    page.get_by_role("button", name="Stop").click()
    expect(answer(page)).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert "The day is fine," in json.dumps(page.url.replace("+", " ").replace("%2C", ","))


@pytest.mark.nightly
def test_five_thousand_tokens_stay_quick(page, server):
    with_vector(server)
    page.goto(link(server, color="vector", vector="mood", layer=1))
    say(page, "long")
    expect(answer(page).locator(".t")).to_have_count(5000, timeout=20_000)
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=20_000)
    answer(page).locator(".tokens").focus()
    spent = page.evaluate(
        """async () => {
            const began = performance.now();
            const text = document.querySelector('article.assistant .tokens');
            const key = {key: 'ArrowRight', cancelable: true};
            for (let nth = 0; nth < 50; nth++)
                text.dispatchEvent(new KeyboardEvent('keydown', key));
            await new Promise(requestAnimationFrame);
            return performance.now() - began;
        }"""
    )
    assert spent < 2000
    expect(answer(page).locator(".readout")).to_contain_text("“word50 ”")


def test_an_error_of_the_server_is_shown_as_text_and_the_answer_can_be_asked_again(page, server):
    page.goto(link(server))
    say(page, "refuse")
    expect(page.get_by_role("alert")).to_contain_text(HOSTILE)
    expect(page.get_by_role("alert").get_by_role("button", name="Answer again")).to_be_visible()


def test_a_prompt_is_answered_at_five_strengths_and_coloured_by_the_vector(page, server):
    with_vector(server)
    page.goto(link(server, "steer", prompt="Hi", v=[["mood", 2, 1.5]]))
    panes = steer(page)
    scales = [-1.5, -0.75, 0, 0.75, 1.5]
    titles = ["mood × −1.5", "mood × −0.75", "not steered", "mood × 0.75", "mood × 1.5"]
    assert panes.locator("h2").all_text_contents() == titles
    for pane, scale in zip(panes.all(), scales, strict=True):
        mood = "gloomy" if scale else "fine"
        expect(pane.locator(".tokens")).to_have_text(f"The day is {mood}, and the sky is blue.")
        expect(pane.locator(".pane-foot")).to_have_text("steered at 11 tokens" if scale else "")
        # The score of position p is sin(p) + layer; what was added to the stream is not in it.
        pane.locator(".t").nth(3).click()
        shown = pane.locator(".readout").text_content()
        found = float(re.search(r"mood (\S+)", shown)[1].replace("−", "-"))
        assert found == pytest.approx(np.sin(5) + 2 - 9 * scale, abs=0.06)
    plans = {
        tuple(edit["scale"] for edit in body["midstream"].get("edits", ())): body["midstream"]
        for body in server.bodies
    }
    assert len(plans) == 5
    assert plans[1.5,]["edits"] == [
        {"op": "steer", "vector": {"name": "mood"}, "layer": 2, "scale": 1.5}
    ]
    assert all(plan["probes"] == plans[()]["probes"] for plan in plans.values())
    page.get_by_label("Answers").select_option("two")  # answers anew
    assert steered(page, 2).locator("h2").all_text_contents() == ["not steered", "mood × 1.5"]


def test_an_example_steers_with_a_click_on_a_server_without_vectors(page, server):
    page.goto(link(server, "steer"))
    page.locator(".empty").get_by_role("button", name="Cheerful").click()
    panes = steered(page)
    expect(panes.nth(4)).to_contain_text("gloomy")
    assert [one.name for one in server.site.engine.vectors.list()] == ["example/cheerful"]
    assert server.bodies[0]["messages"][0]["content"] == "How was your day?"
    [probe] = server.bodies[0]["midstream"]["probes"]
    assert probe["direction"] == {"name": "example/cheerful"}


def test_a_slider_answers_anew_while_it_is_moved(page, server):
    with_vector(server)
    page.goto(link(server, "steer", prompt="Hi", v=[["mood", 2, 1]]))
    steer(page)
    slider = page.get_by_role("slider", name="Strength of mood")
    slider.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    expect(page.locator("article.pane h2").nth(4)).to_have_text("mood × 2")
    expect(steered(page).nth(4).locator(".tokens")).to_contain_text("gloomy")
    asked = {edit["scale"] for body in server.bodies for edit in body["midstream"].get("edits", ())}
    assert asked >= {-2, -1, 1, 2}
    assert len(asked) < 12  # one for each movement would be 24


def test_answers_are_saved_as_a_picture_and_a_vector_as_a_file_that_registers(page, server):
    with_vector(server)
    page.goto(link(server, "steer", prompt="Hi", v=[["mood", 2, 1]]))
    steer(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save picture").click()
    picture = Image.open(saved.value.path())
    assert picture.size == (2400, 1350)
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 50  # texts and two colours
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save mood as a file").click()
    assert saved.value.suggested_filename == "mood.safetensors"
    httpx.put(
        f"{server.url}/v1/midstream/vectors/again",
        content=Path(saved.value.path()).read_bytes(),
        headers={"content-type": "application/octet-stream"},
    ).raise_for_status()
    vectors = server.site.engine.vectors
    first, second = vectors.show("mood")[1], vectors.show("again")[1]
    assert list(first) == list(second)
    assert all((first[tap].numpy() == second[tap].numpy()).all() for tap in first)


def test_the_link_of_a_view_is_copied(page, server):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(link(server, "steer", prompt="Hi"))
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


@pytest.mark.nightly
def test_sliders_set_layer_and_strength_and_are_in_the_link(page, server):
    with_vector(server)
    page.goto(link(server, "steer", prompt="Hi"))
    slider = page.get_by_role("slider", name="Strength of mood")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    page.get_by_label("Layer").select_option("all")
    page.get_by_role("button", name="Add a vector").click()
    exact = page.get_by_label("Strength of mood, as a number").nth(1)
    exact.fill("-12")
    exact.press("Enter")
    assert page.get_by_role("slider").nth(1).get_attribute("min") == "-12"
    page.get_by_label("Answers").select_option("two")
    expect(steer(page, 2).nth(1)).to_contain_text("gloomy")
    [plan] = [body["midstream"] for body in server.bodies if "edits" in body["midstream"]]
    assert plan["edits"] == [
        {"op": "steer", "vector": {"name": "mood"}, "scale": 0.5},
        {"op": "steer", "vector": {"name": "mood"}, "layer": 2, "scale": -12},
    ]
    url = page.url
    page.reload()
    assert page.url == url
    assert page.get_by_label("Strength of mood, as a number").nth(1).input_value() == "-12"


def test_a_vector_is_fitted_to_typed_pairs_and_then_steers_and_colours(page, server):
    page.goto(link(server, "library"))
    page.get_by_label("Name").fill("good/mood")
    page.get_by_label("Positive texts").fill("good a\nnice b\nfine c\nglad d")
    page.get_by_label("Negative texts").fill("bad f\nsad g\nmean hh\ngrim i")
    expect(page.locator(".panel")).to_contain_text("4 pairs, held out together")
    page.get_by_role("button", name="Fit and register").click()
    expect(page.get_by_text("good/mood is registered at 4 layers")).to_be_visible()
    expect(page.locator("table.auc tbody tr")).to_have_count(4)
    expect(page.get_by_role("row", name=re.compile("good.mood.*layers 0 – 3"))).to_be_visible()
    assert [one.name for one in server.site.engine.vectors.list()] == ["good/mood"]
    page.get_by_role("link", name="Colour a chat").click()
    say(page, "abc")
    expect(answer(page).locator(".t")).to_have_count(11)
    probe = server.bodies[0]["midstream"]["probes"][0]
    assert probe["direction"] == {"name": "good/mood"}
    # In the units of the fit: the probe's bias, and the score over half the squared length.
    vector = server.site.engine.vectors.show("good/mood")[1]["resid_post", probe["layer"]].numpy()
    import numpy as np

    score = np.sin(3) + probe["layer"]
    answer(page).locator(".t").first.hover()
    shown = answer(page).locator(".readout").text_content()
    found = float(re.search(r"good/mood (\S+)", shown)[1].replace("−", "-"))
    assert found == pytest.approx(2 * score / float(vector @ vector), rel=2e-2)
    assert probe["bias"] != 0


def test_files_and_pasted_numbers_are_registered_and_pickles_are_not(page, server, tmp_path):
    import numpy as np
    import torch
    from safetensors.numpy import save_file
    from support.gguf_file import gguf_bytes, text

    page.goto(link(server, "library", tab="file"))
    name, register = (
        page.get_by_label("Name"),
        page.get_by_role("button", name="Register", exact=True),
    )
    name.fill("pasted")
    page.get_by_label("Or numbers").fill('{"1": [1, 2, 3]}')
    register.click()
    expect(page.get_by_text("pasted is registered.")).to_be_visible()

    path = tmp_path / "v.safetensors"
    save_file({"resid_post.2": np.ones(3, np.float32)}, path)
    name.fill("filed")
    page.locator("input[type=file]").set_input_files(path)
    register.click()
    expect(page.get_by_text("filed is registered.")).to_be_visible()

    numbers = np.array([1, 2, 3], "<f4").tobytes()
    kind = [(b"general.architecture", 8, text(b"controlvector"))]
    path = tmp_path / "v.gguf"
    path.write_bytes(gguf_bytes(kind, [(b"direction.3", (3,), 0, numbers)]))
    name.fill("control")
    page.locator("input[type=file]").set_input_files(path)
    register.click()
    expect(page.get_by_text("control is registered.")).to_be_visible()
    found = {one.name: one.taps for one in server.site.engine.vectors.list()}
    assert found == {
        "pasted": (("resid_post", 1),),
        "filed": (("resid_post", 2),),
        "control": (("resid_post", 3),),
    }

    path = tmp_path / "v.safetensors"
    torch.save({"x": torch.ones(3)}, path)
    name.fill("pickled")
    page.locator("input[type=file]").set_input_files(path)
    register.click()
    expect(page.get_by_role("alert")).to_contain_text("safetensors")
    assert len(server.site.engine.vectors.list()) == 3


@pytest.mark.nightly
def test_a_vector_is_removed_after_a_question(page, server):
    with_vector(server)
    page.goto(link(server, "library"))
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.get_by_role("button", name="Remove mood").click()
    assert len(server.site.engine.vectors.list()) == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove mood").click()
    expect(page.get_by_text("No vectors yet")).to_be_visible()
    assert not server.site.engine.vectors.list()


@pytest.mark.nightly
def test_what_the_server_refuses_is_told(page, server):
    page.goto(link(server, "library", name="x", positive="a\nb", negative="c", method="pca"))
    page.get_by_role("button", name="Fit and register").click()
    expect(page.get_by_role("alert")).to_contain_text("needs pairs")
    page.get_by_label("Name").fill("../x")
    page.get_by_role("button", name="Fit and register").click()
    expect(page.get_by_role("alert")).to_contain_text("Give it a name")


def test_a_lens_shows_the_likeliest_token_of_each_layer(page, server):
    page.goto(link(server, "layers", prompt="xyz"))
    cells = page.locator(".grid td[data-at]")
    expect(cells).to_have_count(12)
    assert page.locator(".grid tbody th").all_text_contents() == ["3", "2", "1", "0"]
    assert page.locator(".grid thead th").all_text_contents() == ["x", "y", "z"]
    cells.nth(4).hover()
    expect(page.locator(".readout")).to_contain_text("layer 2, “y”  next: “a” 60.7 %")
    assert server.bodies[0]["midstream"]["capture"][0]["positions"] == ["prompt"]


@pytest.mark.nightly
def test_a_vector_is_read_at_each_of_its_layers(page, server):
    with_vector(server, layers=(0, 1, 3))
    page.goto(link(server, "layers", by="vector", vector="mood", prompt="xy", format="chat"))
    expect(page.locator(".grid td.known")).to_have_count(6)
    assert page.locator(".grid tbody th").all_text_contents() == ["3", "1", "0"]
    page.locator(".grid td[data-at]").nth(1).hover()
    expect(page.locator(".readout")).to_contain_text("layer 3, “y”  ⟨h, v⟩ 3.84")


def test_a_patching_heatmap_fills_as_cells_come(page, server):
    engine = server.site.engine
    import asyncio

    count = 0

    async def pause() -> None:
        nonlocal count
        count += 1
        while count > 9 and not server.release.is_set():
            await asyncio.sleep(0.01)

    before, engine.pause, engine.script = engine.pause, pause, None
    try:
        page.goto(link(server, "patching", prompt="abcd", source="efgh", answer="x", other="z"))
        page.get_by_role("button", name="Patch every cell").click()
        cells = page.locator(".grid td[data-at]")
        expect(cells).to_have_count(16)
        expect(page.locator(".grid td.known").first).to_be_visible()
        assert 0 < page.locator(".grid td.known").count() < 16
        expect(page.locator(".progress")).to_contain_text("of 16 cells")
        server.release.set()
        expect(page.locator(".grid td.known")).to_have_count(16)
        expect(page.locator(".progress")).to_contain_text("noise floor 0")
    finally:
        from lab.server.routes.test_fit import script

        engine.pause, engine.script = before, script
    from support.sweep_fake import logprob_of

    value = logprob_of(ord("x"), 3, 1) - logprob_of(ord("z"), 3, 1)
    page.locator('.grid td[data-at="0,1"]').hover()
    shown = page.locator(".readout").text_content()
    assert float(re.search(r"difference ([−\d.]+)", shown)[1].replace("−", "-")) == pytest.approx(
        value, rel=1e-2
    )
