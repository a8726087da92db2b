"""Documents that are cut, joined and given roles, compared with their definition."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.jobs import packing
from lab.jobs.fakes import FakeEngine, job, write_lines
from lab.jobs.packing import END, chat_tokens, check_packed, document, ids_of, stream
from support.pages import blocks
from support.tokenizers import byte_level

from midstream import open_store
from midstream.errors import SpecError, StoreError
from midstream.lab.jobs import DocumentPart, PromptParts, capture_dataset
from midstream.lab.jobs.documents import Document
from midstream.lab.jobs.packs import Packer
from midstream.lab.jobs.prompts import open_prompts
from midstream.lab.jobs.records import Failed
from midstream.plan import Capture, Positions, Role

PROMPT = Capture((0, 2), positions="prompt")
TEXTS = ["abcd", "ab", "abcdefg", "x"]
TALK = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "as it is"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "yes!"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts_of(folder, model, lines, **fields):
    write_lines(folder, lines)
    source, _ = open_prompts(job(folder, **{"model": model, "capture": PROMPT, **fields}))
    return list(source)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    length=st.integers(2, 17),
    without_first=st.booleans(),
)
@settings(deadline=None)
def test_packs_are_a_stream_that_is_cut(lengths, length, without_first):
    packer = Packer(length, -1, without_first)
    documents = [
        Document(line, tuple(range(100 * line, 100 * line + n)), ((1, n),) if n > 1 else ())
        for line, n in enumerate(lengths, 1)
    ]
    prompts = [prompt for document in documents for prompt in packer.add(document)]
    prompts.append(packer.rest())
    expected = stream(
        [[packing.Token(id, d.line, n) for n, id in enumerate(d.token_ids)] for d in documents],
        -1,
        length,
    )
    assert [list(p.token_ids) for p in prompts] == [[t.id for t in pack] for pack in expected]
    for prompt, pack in zip(prompts, expected, strict=True):
        lines, offsets = prompt.parts.origin(range(len(pack)))
        assert lines.tolist() == [token.line or -1 for token in pack]
        assert offsets.tolist() == [token.offset if token.line else -1 for token in pack]
        places = [place for start, stop in prompt.positions for place in range(start, stop)]
        assert places == [
            place
            for place, token in enumerate(pack)
            if token.line and token.offset and not (without_first and not place)
        ]


@pytest.mark.parametrize("without_first", [False, True])
@pytest.mark.parametrize("length", [2, 5, 8, 64])
def test_each_token_of_each_document_is_stored_once(model, tmp_path, length, without_first):
    write_lines(tmp_path, [*TEXTS, {"text": ""}, {"text": 3}])
    exclude = "first" if without_first else ""
    # A document whose only token is its first has no rows then, and is left out.
    packed = [document(line, text) for line, text in enumerate(TEXTS, 1)]
    packed = packed[: 3 if without_first else 4]
    asked = job(tmp_path, model=model, capture=PROMPT, pack=length, exclude=exclude)
    counts = capture_dataset(asked, FakeEngine).counts
    packs = stream(packed, END, length)
    rows = check_packed(tmp_path / "acts", packs, not without_first, without_first)
    assert counts.rows == 2 * rows
    assert counts.failed == 2 + without_first
    texts = [request.metadata["midstream"] for request in open_store(tmp_path / "acts").requests]
    assert not any("prompt" in own for own in texts)
    errors = list(map(json.loads, (tmp_path / "acts/errors.jsonl").read_text().splitlines()))
    assert [error["line"] for error in errors] == [4, 5, 6][-counts.failed :]


def test_the_separator_is_the_end_of_text_or_the_one_that_is_named(model, tmp_path):
    for fields, separator in (({}, END), ({"separator": 0}, 0)):
        (prompt,) = prompts_of(tmp_path, model, ["ab", "c"], pack=9, keep_prompts=True, **fields)
        assert list(prompt.prompt.token_ids) == [*ids_of("ab"), separator, *ids_of("c")]
        assert prompt.prompt.text == ("ab<|im_end|>c" if separator == END else "ab!c")
    byte_level().save_pretrained(tmp_path / "none")
    with pytest.raises(SpecError, match="separator: the tokenizer has no end-of-text token"):
        prompts_of(tmp_path, str(tmp_path / "none"), ["ab"], pack=9)


def test_positions_are_those_of_each_document(model, tmp_path):
    def places(positions, **fields):
        capture = Capture(0, positions=positions)
        rows = prompts_of(tmp_path, model, TEXTS, capture=capture, pack=99, **fields)
        ranges = [row.prompt.positions for row in rows if not isinstance(row, Failed)]
        failed = [row.line for row in rows if isinstance(row, Failed)]
        return [place for spans in ranges for start, stop in spans for place in range(start, stop)
                ], failed  # fmt: skip

    # abcd|ab|abcdefg|x
    assert places("last_prompt") == ([3, 6, 14, 16], [])
    assert places("all") == ([0, 1, 2, 3, 5, 6, *range(8, 15), 16], [])
    assert places("last_row") == ([3, 6, 14, 16], [])
    # A document without the positions fails, and is in no prompt: abcd|ab|abcdefg
    assert places(-2) == ([2, 5, 13], [4])
    assert places({"text": "cd"}) == ([2, 3, 7, 8], [2, 4])
    assert places("prompt", exclude="first") == ([1, 2, 3, 6, *range(9, 15)], [4])
    # Of abcd|abcdefg cut to abc|abc
    assert places({"text": "c"}, truncate=3) == ([2, 6], [2, 4])


def test_lines_are_cut_to_their_first_tokens(model, tmp_path):
    rows = prompts_of(tmp_path, model, ["abcd", "ab"], truncate=3)
    assert [list(row.prompt.token_ids) for row in rows] == [ids_of("abc"), ids_of("ab")]
    assert [row.prompt.positions for row in rows] == [None, None]
    assert [row.prompt.parts for row in rows] == [PromptParts()] * 2


@pytest.mark.parametrize("truncate", [None, 8, 30])
def test_roles_of_a_conversation_are_those_of_its_tokens(model, tmp_path, truncate):
    wanted = chat_tokens(1, TALK)[:truncate]
    fields = {"chat": True, "roles": True, "truncate": truncate}
    (row,) = prompts_of(tmp_path, model, [{"messages": TALK}], **fields)
    assert list(row.prompt.token_ids) == [token.id for token in wanted]
    places = np.arange(len(wanted))
    mask = row.prompt.parts.loss_mask(places)
    assert mask.tolist() == [token.is_assistant for token in wanted]
    users = row.prompt.parts.loss_mask(places, "user")
    assert [wanted[place].id for place in places[users]] == ids_of("why?no")[: users.sum()]
    assert users.sum() == {None: 6, 8: 2, 30: 4}[truncate]


def test_a_conversation_that_the_user_ends_is_asked_on(model, tmp_path):
    rows = prompts_of(tmp_path, model, [{"messages": TALK[:3]}], chat=True, roles=True)
    expected = [token.id for token in chat_tokens(1, TALK[:3])]
    assert list(rows[0].prompt.token_ids)[: len(expected)] == expected
    assert len(rows[0].prompt.token_ids) > len(expected)


def test_roles_select_positions_of_packed_conversations(model, tmp_path):
    capture = Capture(0, positions=Positions([Role("assistant", "all")]))
    talks = [{"messages": TALK}, {"messages": TALK[:1]}, {"messages": TALK}]
    rows = prompts_of(tmp_path, model, talks, chat=True, pack=40, capture=capture)
    failed = [row for row in rows if isinstance(row, Failed)]
    assert [row.line for row in failed] == [2]
    assert "no message of role 'assistant'" in failed[0].reason
    packs = stream([chat_tokens(1, TALK), chat_tokens(3, TALK)], END, 40)
    for row in rows:
        if not isinstance(row, Failed):
            places = [p for start, stop in row.prompt.positions for p in range(start, stop)]
            pack = packs[row.line - 1]
            assert places == [p for p, token in enumerate(pack) if token.is_assistant]


def test_the_page_leads_rows_back_to_their_documents(model, tmp_path, monkeypatch):
    write_lines(tmp_path, [{"messages": TALK}])
    fields = {"model": model, "out": str(tmp_path / "packed"), "capture": PROMPT}
    capture_dataset(job(tmp_path, **fields, chat=True, pack=256, roles=True), FakeEngine)
    monkeypatch.chdir(tmp_path)
    texts = [text for _, _, text in blocks("docs/dataset-capture.md", ["py"])]
    [shown] = [text for text in texts if "PromptParts" in text]
    exec(shown, values := {})
    tokens = chat_tokens(1, TALK)
    origins = list(zip(values["lines"].tolist(), values["offsets"].tolist(), strict=True))
    assert origins == [(token.line, token.offset) for token in tokens]
    assert values["mask"].tolist() == [token.is_assistant for token in tokens]


def test_calls_of_tools_and_reasoning_are_of_the_assistant(model, tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning %}(think)"
        "{{ m.reasoning }}(done){% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "(call){{ c.function.name }} {{ c.function.arguments | tojson }}(done){% endfor %}"
        "<|im_end|>\n"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":12}'}}
    talk = [
        TALK[0],
        {"role": "assistant", "content": None, "reasoning": "so so", "tool_calls": [call]},
        {"role": "tool", "content": "15"},
        TALK[1],
    ]
    fields = {"chat": True, "roles": True, "engine_args": {"chat_template": template}}
    (row,) = prompts_of(tmp_path, model, [{"messages": talk}], **fields)
    ids = np.array(row.prompt.token_ids)
    masked = ids[row.prompt.parts.loss_mask(np.arange(len(ids)))]
    assert masked.tolist() == ids_of("so so" + 'add {"a": 12}' + "as it is")


def test_a_template_that_drops_a_message_gives_no_wrong_mask(model, tmp_path):
    template = "{{ messages[-1].content }}"
    arguments = {"chat_template": template}
    fields = {"chat": True, "roles": True, "engine_args": arguments}
    with pytest.raises(SpecError, match="line 1: roles: user message 0: "):
        prompts_of(tmp_path, model, [{"messages": TALK}], **fields)
    talk = [TALK[0], {"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]
    with pytest.raises(SpecError, match="cannot be cut, packed or given roles|base64"):
        prompts_of(tmp_path, model, [{"messages": talk}], chat=True, roles=True)


def test_other_settings_and_other_documents_are_other_data(model, tmp_path):
    write_lines(tmp_path, TEXTS)
    asked = job(tmp_path, model=model, capture=PROMPT, pack=5, resume=True)
    capture_dataset(asked, FakeEngine)
    for changes, words in (
        ({"pack": 6}, "captured with pack 5"),
        ({"exclude": "first"}, "captured with exclude nothing"),
        ({"separator": 0}, "captured with separator nothing, but this job has 0"),
        ({"truncate": 99}, "captured with truncate nothing"),
    ):
        with pytest.raises(StoreError, match=words):
            capture_dataset(replace(asked, **changes), FakeEngine)
    write_lines(tmp_path, ["abcd", "a", *TEXTS[2:]])
    with pytest.raises(StoreError, match="line 2 was captured with another prompt"):
        capture_dataset(asked, FakeEngine)


def test_a_packed_prompt_that_fails_is_named_with_its_lines(model, tmp_path):
    write_lines(tmp_path, TEXTS)

    class Refusing(FakeEngine):
        def add(self, record):
            if record.line == 2:
                raise SpecError("", "the prompt is too long")
            super().add(record)

        def _end(self, record):
            if record.line == 1:
                return Failed(1, "edits were not applied")
            return super()._end(record)

    capture_dataset(job(tmp_path, model=model, capture=PROMPT, pack=6), Refusing)
    errors = list(map(json.loads, (tmp_path / "acts/errors.jsonl").read_text().splitlines()))
    assert sorted((error["line"], error["reason"]) for error in errors) == [
        (1, "packed prompt 1, of lines 1 to 2: edits were not applied"),
        (2, "packed prompt 2, of lines 2 to 3: the prompt is too long"),
    ]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"pack": 1}, "pack"),
        ({"truncate": 0}, "truncate"),
        ({"separator": 3}, "separator"),
        ({"pack": 8, "separator": -1}, "separator"),
        ({"exclude": "last"}, "exclude"),
        ({"format": "xml"}, "format"),
        ({"roles": True}, "roles"),
        ({"pack": 8, "max_tokens": 2}, "max_tokens"),
        ({"pack": 8, "capture": Capture(0, positions="prompt", max_rows=2)}, "capture.max_rows"),
        ({"pack": 8, "capture": Capture(0, reduce="mean")}, "capture.reduce"),
        ({"pack": 8, "engine_args": {"max_model_len": 8}}, "pack"),
        ({"exclude": "first", "capture": Capture(0, positions="last_row")}, "exclude"),
    ],
)
def test_what_cannot_be_packed_cut_or_left_out_is_refused(tmp_path, fields, path):
    with pytest.raises(SpecError) as error:
        job(tmp_path, **fields)
    assert error.value.path.startswith(path)


def test_parts_are_read_back_and_say_what_they_lack():
    parts = PromptParts((DocumentPart(3, 0, 7, 2), DocumentPart(9, 3, 0, 4)),
                        {"assistant": ((1, 2), (2, 4)), "user": ()})  # fmt: skip
    assert PromptParts.read(json.loads(json.dumps(parts.to_metadata()))) == parts
    lines, offsets = parts.origin([0, 1, 2, 3, 6, 7])
    assert lines.tolist() == [3, 3, -1, 9, 9, -1]
    assert offsets.tolist() == [7, 8, -1, 0, 3, -1]
    assert parts.loss_mask([0, 1, 2, 3, 4]).tolist() == [False, True, True, True, False]
    assert parts.loss_mask([1], "user").tolist() == [False]
    assert PromptParts.read({"line": 3}) == PromptParts()
    with pytest.raises(ValueError, match="is not packed"):
        PromptParts().origin([0])
    with pytest.raises(ValueError, match="roles were not stored"):
        PromptParts().loss_mask([0])


def test_exclude_first_alone_leaves_the_prompt_to_the_engine(tmp_path):
    asked = job(tmp_path, exclude="first", capture=Capture(0, positions="prompt"))
    assert not asked.is_tokenised
    assert asked.plan.captures[0].positions == Positions("prompt", exclude=0)
    assert "exclude" in asked.terms
