import pytest
from support.refusals import refused, refused_calls

from midstream.errors import SpecError
from midstream.plan.positions.items import Image, Media, Role, Text
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import MediaItem, Message, Prompt
from midstream.plan.positions.select import PromptSelections, select
from midstream.plan.positions.text_map import TextMap
from midstream.plan.positions.work import MAX_MATCHES

WORDS = TextMap("the concatenated cat sat, cat", (0, 3, 16, 20, 25), (3, 16, 20, 25, 29))
CHAT = (
    Message("system", 0, 1, 3),
    Message("user", 1, 4, 6),
    Message("assistant", 2, 7, 7),
    Message("user", 3, 8, 9),
    Message("tool", 4, problem="its content has a part of type 'refusal', which is neither text"),
)


MEDIA = (
    MediaItem("image", 0, 6, ((1, 3), (4, 5))),
    MediaItem("audio", 6, 8, ((6, 8),)),
    MediaItem("image", 9, 11, ((9, 11),)),
)


def _words(item):
    return select(Positions(item), Prompt(5, text=WORDS), 4).ranges


def _chat(item):
    return select(Positions(item), Prompt(10, messages=CHAT), 4).ranges


def test_occurrences_of_a_text_are_counted_from_either_end():
    assert _words(Text("cat")) == ((2, 3), (4, 5))
    assert _words(Text("cat", 0)) == _words(Text("cat", -2)) == ((2, 3),)
    assert _words(Text("cat", 1)) == _words(Text("cat", -1)) == ((4, 5),)


def test_a_text_that_is_not_there_is_explained():
    refused(
        lambda item: _words([0, item]),
        (Text("dog"), "positions[1]", "the prompt does not contain 'dog'$"),
        (Text("Cat"), "positions[1]", "the prompt does not contain 'Cat'$"),
        (Text("sat"), "positions[1]", "the tokens there: ' cat' ' sat,' ' cat'$"),
        (Text("cat", 2), "positions[1]", "2 is out of range: .* has 2 of 'cat', expected 0 to 1"),
        (Text("cat", -3), "positions[1]", "occurrence -3 is out of range"),
    )


def test_a_role_is_the_content_of_its_last_message_or_of_others():
    assert _chat(Role("user")) == ((8, 9),)
    assert _chat(Role("user", 0)) == _chat(Role("user", -2)) == ((4, 6),)
    assert _chat(Role("user", "all")) == ((4, 6), (8, 9))
    assert _chat([Role("system"), Role("user", "all")]) == ((1, 3), (4, 6), (8, 9))


def test_a_message_that_is_not_there_is_explained():
    roles = "no message of role 'usr'; its roles: 'system', 'user', 'assistant', 'tool'"
    refused(
        _chat,
        (Role("usr"), "positions", roles),
        (Role("user", 2), "positions", "2 is out of range: the chat has 2 of role 'user'"),
        (Role("user", -3), "positions", "message -3 is out of range"),
        (Role("assistant"), "positions", "the message has no content in the prompt"),
        (Role("assistant", "all"), "positions", "the message has no content in the prompt"),
        (Role("tool"), "positions", "of message 4 are unknown: its content has a part of type"),
    )


def _media(item):
    return select(Positions(item), Prompt(12, media=MEDIA), 4).ranges


def test_media_are_counted_by_kind_and_are_where_their_embeddings_are():
    assert _media(Image(0)) == _media(Image(-2)) == ((1, 3), (4, 5))
    assert _media(Image("all")) == ((1, 3), (4, 5), (9, 11))
    assert _media(Media(0, "audio")) == _media(Media("all", "audio")) == ((6, 8),)
    assert _media([Image(1), 0, Media(0, "audio")]) == ((0, 1), (6, 8), (9, 11))
    everything_else = Positions("prompt", exclude=[Image("all"), Image(5), Media(0, "video")])
    where = select(everything_else, Prompt(12, media=MEDIA), 4)
    assert where.ranges == ((0, 1), (3, 4), (5, 9), (11, 12))


def test_media_that_are_not_there_are_explained():
    refused(
        lambda item: _media([0, item]),
        (Image(2), "positions[1]", "image 2 is out of range: .* expected 0 to 1 .or −2 to −1"),
        (Image(-3), "positions[1]", "image -3 is out of range"),
        (Media("all", "video"), "positions[1]", "the prompt has no video; it has audio, image$"),
        (Media(1, "audio"), "positions[1]", "audio 1 is out of range"),
    )


def test_tokens_of_media_count_for_the_budget():
    ranges = tuple((place, place + 1) for place in range(0, 2 * MAX_MATCHES // 8, 2))
    many = MediaItem("image", 0, 2 * MAX_MATCHES // 8, ranges)
    prompt = Prompt(MAX_MATCHES, media=(many,))
    selections = PromptSelections(prompt, 4)
    for kept in range(1, 9):
        selections.select(Positions(Image("all"), exclude=kept))
    with pytest.raises(SpecError, match="the budget is"):
        selections.select(Positions(Image("all"), exclude=9))


def test_what_is_costly_is_worked_out_once_and_only_when_asked_for():
    calls = []

    def text():
        calls.append("text")
        return WORDS

    def messages():
        calls.append("messages")
        return CHAT[:2]

    prompt = Prompt(5, text=text, messages=messages)
    select(Positions("all"), prompt, 4)
    assert calls == []
    select(Positions([Text("cat"), Text("the")]), prompt, 4)
    select(Positions(Text("cat")), prompt, 4)
    assert calls == ["text"]
    select(Positions("all", exclude=Role("user")), prompt, 4)
    assert calls == ["text", "messages"]


def test_a_prompt_that_contradicts_itself_is_refused():
    refused_calls(
        (lambda: Prompt(0), "at least 1 token, got 0"),
        (lambda: Prompt(3, (1, 2)), "expected 3, one per token, got 2"),
        (
            lambda: select(Positions(Text("cat")), Prompt(4, text=WORDS), 4),
            "the text has 5 tokens, but the prompt has 4",
        ),
    )
