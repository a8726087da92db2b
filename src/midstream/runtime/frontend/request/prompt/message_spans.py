"""Positions of a chat's messages in the prompt that a chat template makes of them."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import Region, map_of_rendering, text_map
from midstream.plan.positions.items import CONTENT
from midstream.plan.positions.prompt import MediaItem, Message
from midstream.plan.positions.ranges import merge
from midstream.plan.positions.text_map import TextMap
from midstream.plan.positions.work import check_rendered
from midstream.runtime.frontend.request.prompt.harmony import harmony_spans, is_harmony
from midstream.runtime.frontend.request.prompt.message_parts import PartFinder
from midstream.validation import show

if TYPE_CHECKING:
    from vllm.renderers.params import ChatParams

# Renders the messages of a chat to the text of the prompt.
Render = Callable[[list[dict[str, Any]]], str]

# Arguments of `LLM.chat` that the chat template gets; each is part of that function's seam.
TEMPLATE_ARGUMENTS = (
    "chat_template",
    "chat_template_content_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
)
# Characters that a template may write between the parts of one content.
_MOST_JOINED = 256

_TEXT_PARTS = ("text", "input_text", "output_text")
# Parts of media that vLLM loads, and the field of each that says from where.
_LOADED = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_pil": "image_pil",
    "audio_url": "audio_url",
    "input_audio": "input_audio",
    "video_url": "video_url",
}
_MEDIA_PARTS = (*_LOADED, "image_embeds", "audio_embeds", "video_embeds")


def message_spans(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prompt_token_ids: Sequence[int],
    *,
    render: Render | None = None,
    media: Sequence[MediaItem] = (),
    part: str = CONTENT,
    **template_kwargs: Any,
) -> tuple[Message, ...]:
    """Return the tokens of each message's content, or of another `part` of it, see `Role`.

    Contents are located by rendering the chat again with markers in their places: the text before
    and after a marker must be the text before and after the content. A token with characters of
    both the content and the template belongs to the content. The content of a message with `media`
    is all that the template writes for it. The `problem` of a Message says why it cannot be
    located, as its content is of another kind, or the template drops, repeats or rewrites it.
    Without `render` the tokenizer's `apply_chat_template` gets `template_kwargs`.
    """
    if render is None:
        render = _by_template(tokenizer, template_kwargs)
    message_dicts = [dict(message) for message in messages]
    text = render(message_dicts)
    try:
        tokens = map_of_rendering(tokenizer, text, prompt_token_ids, _regions_of(media))
    except SpecError:
        decoded = text_map(tokenizer, prompt_token_ids)
        if not is_harmony(decoded.text):
            raise
        return harmony_spans(message_dicts, decoded, part)
    finder = _Finder(message_dicts, render, text, tokens)
    return finder.all() if part == CONTENT else finder.parts(part)


def has_media(prompt: str | Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a prompt is a chat with images, audio or videos."""
    if isinstance(prompt, str):
        return False
    contents = (message.get("content") for message in prompt)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(_sort(part) in _MEDIA_PARTS for part in parts)


def _regions_of(media: Sequence[MediaItem]) -> list[Region]:
    """Return the placeholders, ascending; those of a video with its audio are one."""
    regions = merge((item.start, item.stop) for item in media)
    return [(start, stop) for start, stop in regions if stop is not None]


def chat_params(
    chat_template: str | None = None,
    chat_template_content_format: Any = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> ChatParams:
    """Return vLLM's parameters of a chat's template; see `LLM.chat` for the arguments."""
    from vllm.renderers.params import ChatParams

    return ChatParams(
        chat_template=chat_template,
        chat_template_content_format=chat_template_content_format,
        chat_template_kwargs={
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **({} if tools is None else {"tools": tools}),
            "tokenize": False,
        },
    )


def chat_renderer(renderer: Any, params: ChatParams) -> Render:
    """Return a function that renders a chat as vLLM's renderer does, for `message_spans`. It loads
    no images.
    """
    from midstream.runtime.frontend.request.prompt.inputs import named_refusals  # imports vLLM

    def render(messages: list[dict[str, Any]]) -> str:
        with named_refusals():
            _, prompt = renderer.render_messages(list(map(_unloaded, messages)), params)
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise SpecError("", "this model's chats are made into tokens without a text")
        return text

    return render


def template_arguments(
    chat: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a chat call's template gets, by name; `args` follow the sampling parameters."""
    bound = inspect.signature(chat).bind_partial(None, None, None, *args, **named)
    return {name: bound.arguments[name] for name in TEMPLATE_ARGUMENTS if name in bound.arguments}


def _unloaded(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with media that are known by an id alone, for which vLLM loads nothing."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    parts = []
    for part in content:
        name = _LOADED.get(_sort(part))
        parts.append(part if name is None else {**part, name: None, "uuid": "not loaded"})
    return {**message, "content": parts}


def _by_template(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Render:
    def render(messages: list[dict[str, Any]]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, **{**template_kwargs, "tokenize": False})
        )

    return render


class _Finder:
    """Locates messages in the text of their chat.

    One rendering has a marker in place of every content. What the template writes between the
    markers is between the contents in the text. A message whose place does not follow from that is
    rendered with the only marker, which the budget limits.
    """

    def __init__(
        self, messages: list[dict[str, Any]], render: Render, text: str, tokens: TextMap
    ) -> None:
        self._messages = messages
        self._render = render
        self._text = text
        self._tokens = tokens
        self._mark = _unused_mark(text)
        self._rendered = 0
        # Of the messages that have a content: the texts in it, or why it cannot be located.
        self._contents: dict[int, list[str] | SpecError] = {}
        self._with_media: set[int] = set()

    def all(self) -> tuple[Message, ...]:
        for index, message in enumerate(self._messages):
            try:
                texts, has_media = _parts(message.get("content"))
            except SpecError as error:
                self._contents[index] = error
                continue
            if has_media:
                self._with_media.add(index)
            if has_media or any(texts):
                self._contents[index] = texts
        regions = self._regions()
        return tuple(self._message(index, regions) for index in range(len(self._messages)))

    def parts(self, part: str) -> tuple[Message, ...]:
        """Return a part of each message; one that has none is empty."""
        find = getattr(PartFinder(self._render_with, self._text, self._mark), part)
        contents: tuple[Message, ...] = ()
        spans = []
        for index, message in enumerate(self._messages):
            role = str(message.get("role", ""))
            try:
                region = find(index, message)
            except SpecError as error:
                spans.append(Message(role, index, problem=error.problem))
                continue
            if region is None and part == "answer":
                contents = contents or self.all()
                spans.append(contents[index])
                continue
            start, stop = (0, 0) if region is None else self._tokens.tokens(*region)
            spans.append(Message(role, index, start, stop))
        return tuple(spans)

    def _render_with(self, index: int, message: dict[str, Any]) -> str:
        self._rendered += len(self._messages)
        check_rendered(self._rendered)
        return self._render([*self._messages[:index], message, *self._messages[index + 1 :]])

    def _message(self, index: int, regions: dict[int, Region]) -> Message:
        role = str(self._messages[index].get("role", ""))
        parts = self._contents.get(index)
        try:
            if parts is None:
                return Message(role, index)
            if isinstance(parts, SpecError):
                raise parts
            start, stop = regions[index] if index in regions else self._region_of(index)
            within = _whole if index in self._with_media else _within
            first, end = within(self._text[start:stop], parts)
            first, end = self._tokens.tokens(start + first, start + end)
        except SpecError as error:
            return Message(role, index, problem=error.problem)
        return Message(role, index, first, end)

    def _regions(self) -> dict[int, Region]:
        """Return what the template wrote for each message, as far as one rendering tells."""
        wanted = {index for index, parts in self._contents.items() if isinstance(parts, list)}
        try:
            pieces = re.split(f"{self._mark}([0-9]+)end", self._render(self._marked(wanted)))
        except Exception:  # noqa: BLE001 - a template may reject a marker where it reads contents
            return {}
        gaps, order = pieces[::2], [int(number) for number in pieces[1::2]]
        times = Counter(order)
        text, regions = self._text, dict[int, Region]()
        stop: int | None
        place = len(gaps[0]) if text.startswith(gaps[0]) else None
        for gap_index, index in enumerate(order):
            gap, parts = gaps[gap_index + 1], self._contents[index]
            assert isinstance(parts, list)
            is_last = gap_index + 1 == len(order)
            if place is None or order.count(index) > 1:
                return {}
            if is_last:
                stop = len(text) - len(gap) if text.endswith(gap) else -1
            else:
                stop = None if index in self._with_media else self._stop(place, parts, gap)
            if stop is None:
                try:
                    start, stop = self._region_of(index)
                except SpecError:
                    return {}
                place = place if start == place and text.startswith(gap, stop) else None
            if place is None or stop < place:
                return {}
            if times[index] == 1:
                regions[index] = place, stop
            place = stop + len(gap)
        return regions

    def _stop(self, start: int, parts: list[str], gap: str) -> int | None:
        """Return where a content at `start`, before `gap`, ends; None: at no or several places."""
        text, whole = self._text, "".join(parts)
        stops = {
            start + len(content)
            for content in (whole, whole.strip())
            if text.startswith(content, start) and text.startswith(gap, start + len(content))
        }
        if not stops and gap:
            # The template drops a part of it, or joins its parts.
            last = start + len(whole) + len(gap) + _MOST_JOINED
            stop = text.find(gap, start, last)
            if stop >= 0 and text.find(gap, stop + 1, last) < 0:
                stops = {stop}
        return stops.pop() if len(stops) == 1 else None

    def _region_of(self, index: int) -> Region:
        """Return [start, stop) of what the template wrote for a content, by another rendering."""
        (marked,) = self._marked({index})[index : index + 1]
        pieces = re.split(f"{self._mark}{index}end", self._render_with(index, marked))
        if len(pieces) != 2:
            how = "does not write it as it is" if len(pieces) == 1 else "writes it more than once"
            raise SpecError("", f"the chat template {how}")
        before, after = pieces
        text = self._text
        end = len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and len(before) <= end):
            raise SpecError("", "the chat template treats it differently from other contents")
        return len(before), end

    def _marked(self, indices: Container[int]) -> list[dict[str, Any]]:
        marked = []
        for index, message in enumerate(self._messages):
            if index not in indices:
                marked.append(message)
                continue
            content: Any = f"{self._mark}{index}end"
            if not isinstance(message["content"], str):
                content = [{"type": "text", "text": content}]
            marked.append({**message, "content": content})
        return marked


def _unused_mark(text: str) -> str:
    """Return a word that is not in the chat, and that no template has a reason to change."""
    used = set(map(int, re.findall(r"midstreamcontent([0-9]{1,9})mark", text)))
    number = next(number for number in count() if number not in used)
    return f"midstreamcontent{number}mark"


def _sort(part: Any) -> str:
    """Return the type of a part of a content; vLLM takes it from the field if it is not given."""
    if not isinstance(part, Mapping):
        return "text" if isinstance(part, str) else type(part).__name__
    of_field = next((name for name in _MEDIA_PARTS if name in part), "text")
    return str(part.get("type", of_field))


def _parts(content: Any) -> tuple[list[str], bool]:
    """Return the texts of a content, and whether it has media."""
    if content is None:
        return [], False
    if isinstance(content, str):
        return [content], False
    if not isinstance(content, Sequence):
        raise SpecError("", f"its content is a `{type(content).__name__}`, not text")
    texts, has_media = [], False
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        sort = _sort(part)
        if sort in _MEDIA_PARTS:
            has_media = True
            continue
        text = part.get("text") if isinstance(part, Mapping) else None
        if sort not in _TEXT_PARTS or not isinstance(text, str):
            raise SpecError(
                "", f"its content has a part of type {show(sort)}, which is neither text nor media"
            )
        texts.append(text)
    return texts, has_media


def _whole(region: str, texts: list[str]) -> Region:
    """Return all of what the template wrote for a content with media, which must have its texts."""
    reached = 0
    for text in map(str.strip, texts):
        place = region.find(text, reached)
        if place < 0:
            raise SpecError("", "the chat template rewrites it, or leaves it out")
        reached = place + len(text)
    return 0, len(region)


def _is_json_of(region: str, content: str) -> bool:
    """Return whether the template wrote a content as the inside of a string of JSON."""
    if "\\" not in region:
        return False
    try:
        return bool(json.loads(f'"{region}"') == content)
    except json.JSONDecodeError:
        return False


def _within(region: str, parts: list[str]) -> tuple[int, int]:
    """Return [start, stop) of the parts in the text that the template wrote for them. A template
    may drop the outer whitespace of a content: then all of the region is content.
    """
    whole = "".join(parts)
    if region in whole and not (region.strip() or whole.strip()):
        return 0, len(region)
    if len(parts) == 1 and region.strip() and region in parts[0]:
        left_out = [piece.strip() for piece in parts[0].split(region, 1) if piece.strip()]
        if left_out:
            raise SpecError(
                "",
                f"the chat template leaves out {show(left_out[0])} of its content; give the "
                "content without it, or select what is left by a Text",
            )
        return 0, len(region)
    if _is_json_of(region, whole):
        return 0, len(region)
    texts = [part for part in (text.strip() for text in parts) if part] or [whole]
    start, reached = None, 0
    for part in texts:
        place = region.find(part, reached)
        if place < 0:
            raise SpecError("", "the chat template rewrites it, or leaves it out")
        start, reached = place if start is None else start, place + len(part)
    # If it occurs more than once, text of the template may be taken for it.
    if start is None or (len(texts) == 1 and region.count(texts[0]) > 1):
        raise SpecError("", "the chat template writes it more than once")
    return start, reached
