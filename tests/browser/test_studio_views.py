"""All of Studio's views in Chromium: code, phone, keyboard, hostile text, keys, a lost server."""

import pytest
from support.chromium import sync_api
from support.studio_page import VIEWS, answer, link, say, steer, with_vector
from support.studio_server import HOSTILE, MODEL, studio

expect = sync_api().expect


@pytest.mark.parametrize("view", VIEWS)
def test_the_code_of_a_view_names_what_it_asks(page, server, view):
    with_vector(server)
    state = {
        "chat": {
            "m": [{"role": "user", "content": "it's \"so\""}],
            "color": "vector", "vector": "mood", "layer": 2,
        },
        "steer": {"prompt": "it's \"so\"", "v": [["mood", 2, 1.5]]},
        "library": {"name": "mood2", "positive": "it's \"so\"", "negative": "b"},
        "layers": {"prompt": "it's \"so\"", "by": "vector", "vector": "mood"},
        "patching": {"prompt": "it's \"so\"", "source": "efgh", "answer": "x", "other": "z"},
    }[view]  # fmt: skip
    page.goto(link(server, view, **state))
    page.get_by_text("Code of this view").click()
    code = page.get_by_label("Code", exact=True)
    expect(code).to_contain_text("client = Client(")
    text = code.text_content()
    compile(text, view, "exec")
    assert 'it\'s \\"so\\"' in text
    assert server.url in text
    page.get_by_role("button", name="curl").click()
    expect(code).to_contain_text("curl -sSf")
    assert "it'\\''s" in code.text_content()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser, server, view, scheme):
    with_vector(server, "a-very-long-name-of-a-vector." + "x" * 90)
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, color_scheme=scheme, has_touch=True
    )
    page = context.new_page()
    page.goto(link(server, view))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    small = page.evaluate(
        """[...document.querySelectorAll('main :is(button, select, input[type=text]), nav a')]
            .filter(e => e.offsetParent && e.getBoundingClientRect().height < 24)
            .map(e => e.outerHTML)"""
    )
    assert small == [] or view == "library"  # rows of the library's table have links of a line
    context.close()


def test_a_wide_map_scrolls_in_its_card_on_a_phone(page, server):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(link(server, "layers", prompt="abcdefghijklmnopqrstuvwxyz"))
    expect(page.locator(".grid td.known").last).to_be_attached()
    rights = page.evaluate(
        "[...document.querySelectorAll('.panel, .main > *')]"
        ".map(e => e.getBoundingClientRect().right)"
    )
    assert max(rights) <= 390 - 16  # the page's margin
    scroll = page.locator(".grid .scroll")
    assert scroll.evaluate("e => e.scrollWidth > e.clientWidth")


def test_it_is_used_by_keyboard_alone(page, server):
    page.goto(link(server))
    expect(page.get_by_role("heading", level=1, name="Chat")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message":
            break
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".t")).to_have_count(11)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(3):
        page.keyboard.press("Shift+Tab")
        if "tokens" in (page.evaluate("document.activeElement.className") or ""):
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(answer(page).locator(".t.on")).to_have_text(" is")
    page.keyboard.press("End")
    expect(answer(page).locator(".t.on")).to_have_text(".")


def test_the_link_of_the_view_is_in_sight_on_a_narrow_screen(page, server):
    page.set_viewport_size({"width": 390, "height": 800})
    for path, title in (("patching", "Patching"), ("chat", "Chat")):
        page.goto(link(server, path))
        current = page.locator("nav [aria-current]")
        expect(current).to_have_text(title)
        expect(current).to_be_in_viewport(ratio=1)


def test_hostile_text_is_text_everywhere(page, server):
    with_vector(server)
    page.goto(
        link(
            server,
            m=[{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}],
        )
    )
    expect(page.locator(".model")).to_have_text(MODEL)
    say(page, f"hostile {HOSTILE}")
    expect(answer(page).locator(".t")).to_have_count(5)
    assert HOSTILE in answer(page).locator(".tokens").text_content()
    page.get_by_text("Code of this view").click()
    page.goto(link(server, "steer", prompt=f"hostile {HOSTILE}", v=[[HOSTILE, 1, 1]]))
    expect(steer(page).nth(4)).to_contain_text("<script>")
    page.goto(link(server, "layers", prompt=HOSTILE[:9]))
    expect(page.locator(".grid td.known").first).to_be_visible()
    for hash in (f"#/{HOSTILE}?x={HOSTILE}", "#/chat?m=[1,{}]&__proto__=1", "#/steer?v=[[1],null]"):
        page.goto(f"{server.url}/midstream/{hash}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert page.locator("main script, main img").count() == 0


@pytest.mark.nightly
def test_a_server_that_dies_in_the_middle_is_told_and_its_return_noticed(browser, page):
    with studio() as first:
        page.goto(link(first))
        say(page, "hold on")
        expect(answer(page).locator(".t")).to_have_count(5)
        port = first.port
        first.stop()
        expect(page.get_by_role("alert")).to_contain_text("stopped answering in the middle")
        expect(page.locator(".status")).to_have_text("server unreachable")
        assert answer(page).locator(".tokens").text_content() == "The day is fine,"
    with studio(port=port) as second:
        second.release.set()
        page.get_by_role("button", name="Answer again").click()
        expect(answer(page).locator(".t")).to_have_count(11)
        expect(page.locator(".status")).to_have_text("")


def test_a_server_with_a_key_is_asked_for_it_and_the_key_stays_in_the_tab(page):
    with studio(api_key="secret") as server:
        page.goto(link(server))
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Use them").click()
        expect(page.get_by_role("heading", name="This server wants a key")).to_be_visible()
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        say(page, "hello")
        expect(answer(page).locator(".t")).to_have_count(11)
        assert "secret" not in page.url
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "secret" in page.evaluate("sessionStorage.getItem('midstream.keys')")
        page.get_by_text("Code of this view").click()
        code = page.get_by_label("Code", exact=True)
        expect(code).to_contain_text('os.environ["MIDSTREAM_KEY"]')
        assert "secret" not in code.text_content()
