"""Server-wide edits and captures at the messages of a chat."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engines import engine, greedy

from midstream import Capture, Role, Steer, Text
from midstream.errors import SpecError

TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "hello?"},
]
EDIT = Steer(torch.ones(tiny.HIDDEN), 1, positions=Role("user", 0))


@pytest.fixture(scope="module")
def llm(talking_llama: Path) -> Iterator[Any]:
    with engine(talking_llama) as found:
        yield found


@pytest.fixture(autouse=True)
def cleared(llm: Any) -> Iterator[None]:
    yield
    llm.steering.clear()
    llm.captures.clear()


def ask(llm: Any, talk: Any = TALK, **asked: Any) -> Any:
    return llm.chat(talk, greedy(2), use_tqdm=False, **asked)[0]


@pytest.mark.parametrize("capture", [None, Capture(0), Capture(0, positions=Text("yes"))])
def test_an_edit_of_every_request_finds_the_message_whatever_the_call_asks_for(llm, capture):
    expected = ask(llm, edits=[EDIT]).receipt
    llm.steering.set(base=EDIT)
    found = ask(llm, capture=capture).receipt
    assert found.edited == expected.edited
    places = {one.what: one.positions for one in found.selected}
    assert places["steering[-1]"] == expected.selected[0].positions
    assert places["steering[-1]"] == ((6, 10),)  # after "<|im_start|>user\n"


def test_a_capture_of_every_request_finds_the_message(llm):
    expected = ask(llm, capture=Capture(1, positions=Role("user"))).activations
    llm.captures.set("asked", Capture(1, positions=Role("user")), "memory")
    found = ask(llm).activations
    assert found.positions.tolist() == expected.positions.tolist()
    torch.testing.assert_close(found[1], expected[1])


def test_a_prompt_that_is_no_chat_is_still_refused(llm):
    llm.steering.set(base=EDIT)
    with pytest.raises(SpecError, match="chat messages"):
        llm.generate("hello", greedy(2), use_tqdm=False)
