"""`llm.ask`: rows of one request at tokens of another, against transformers with plain hooks."""

import pytest
import torch
from support import adapters, asking_model, engines
from support.asking_model import HIDDEN, Hooked, placing
from support.refusals import refused

from midstream import Capture, Steer
from midstream.errors import SpecError
from midstream.lab.api.ask import TEMPLATE

LENGTH, FROM, INTO, BLOCK = 6, 3, 1, 32
SUBJECT = "the parrot sleeps"
QUESTION = "What is it thinking of?"
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return asking_model.make(tmp_path_factory.mktemp("asking"))


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    return adapters.make(model, tmp_path_factory.mktemp("adapter"), seed=5)


@pytest.fixture(scope="module")
def hooked(model):
    return Hooked(model)


@pytest.fixture(scope="module")
def llm(model):
    settings = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_seqs": 8}
    with engines.engine(model, enable_lora=True, max_lora_rank=8, **settings) as made:
        yield made


@pytest.fixture(autouse=True)
def without_blocks(llm):
    assert llm.reset_prefix_cache()


def params(length=LENGTH):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=length, logprobs=0, ignore_eos=True)


def captured(llm, text=SUBJECT):
    taken = Capture([2, FROM], positions="prompt")
    return llm.generate(text, params(1), capture=taken, use_tqdm=False)[0]


def ask(llm, sources, question=QUESTION, layer=FROM, **more):
    given = {"sampling_params": params(), "use_tqdm": False, **more}
    return llm.ask(sources, question, layer, **given)


def content(count, question=QUESTION, placeholder=" ?"):
    return f"Layer: {FROM}\n{placeholder * count} \n{question}"


def assert_answers(output, hooked, rows, text, **how):
    """It is what transformers answers, with the rows put in place by hooks."""
    ids = hooked.prompt(text)
    assert output.prompt_token_ids == ids
    where = ids.index(hooked.tokenizer.convert_tokens_to_ids(how.pop("placeholder", " ?")))
    tokens, scores = hooked.answer(ids, how.pop("into", INTO), placing(rows, where, **how), LENGTH)
    (completion,) = output.outputs
    assert list(completion.token_ids) == tokens
    found = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(scores), **CLOSE)
    edited = output.receipt.edited
    assert (output.receipt.status, edited.expected) == ("ok", len(rows))
    assert edited.applied + edited.cached == len(rows)
    assert output.receipt.selected[0].positions == ((where, where + len(rows)),)


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize("norm", ["match", None])
def test_an_answer_is_that_of_hooks_that_place_the_same_rows(llm, hooked, mode, norm):
    source = captured(llm)
    rows = hooked.rows(source.prompt_token_ids, FROM)
    torch.testing.assert_close(source.activations["resid_post", FROM], rows, **CLOSE)
    (output,) = ask(llm, source, mode=mode, norm=norm)
    assert_answers(output, hooked, rows, content(len(rows)), mode=mode, norm=norm)


def test_rows_of_listed_positions_are_placed_in_their_order(llm, hooked):
    source = captured(llm)
    rows = hooked.rows(source.prompt_token_ids, 2)[[7, 2, 5]]
    how = {"layer": 2, "positions": [7, 2, 5], "into": 0, "placeholder": " #"}
    template = "{question} {layer}:{rows}"
    (output,) = ask(llm, source, "is it {rows}, {layer} ?", template=template, **how)
    text = "is it {rows}, {layer} ? 2: # # #"
    assert_answers(output, hooked, rows, text, into=0, placeholder=" #")


def test_several_questions_are_answered_in_one_batch_each_with_its_own_rows(llm, hooked):
    sources = [captured(llm, text) for text in (SUBJECT, "a ship", "ten green bottles")]
    rows = [hooked.rows(source.prompt_token_ids, FROM) for source in sources]
    first = rows[0][0]
    questions = [QUESTION, "Who?", "Where, and when?"]
    for output, mine, question in zip(ask(llm, sources, questions), rows, questions, strict=True):
        assert_answers(output, hooked, mine, content(len(mine), question))
    for output, mine in zip(ask(llm, sources), rows, strict=True):
        assert_answers(output, hooked, mine, content(len(mine)))
    forms = [first, sources[0].activations, sources[0].outputs[0]]
    wanted = [first[None], rows[0], rows[0]]
    for output, mine in zip(ask(llm, forms), wanted, strict=True):
        assert_answers(output, hooked, mine, content(len(mine)))
    for output, question in zip(ask(llm, first, questions), questions, strict=True):
        assert_answers(output, hooked, first[None], content(1, question))


def test_questions_and_ordinary_requests_in_a_batch_do_not_change_one_another(llm, hooked):
    source = captured(llm)
    rows = source.activations["resid_post", FROM]
    (alone,) = ask(llm, source)
    plain = [hooked.prompt(content(len(rows))), hooked.prompt("hello")]
    prompts = [{"prompt_token_ids": ids} for ids in (plain[0], alone.prompt_token_ids, plain[1])]
    where = [position for start, stop in alone.receipt.selected[0].positions
             for position in range(start, stop)]  # fmt: skip
    edit = Steer(rows=rows, layer=INTO, positions=where, norm="match")
    assert llm.reset_prefix_cache()
    mixed = llm.generate(prompts, params(), edits=[[], [edit], []], use_tqdm=False)
    assert_answers(mixed[1], hooked, rows, content(len(rows)))
    for output in (mixed[0], mixed[2]):
        tokens, _ = hooked.answer(output.prompt_token_ids, INTO, lambda h: None, LENGTH)
        assert list(output.outputs[0].token_ids) == tokens


def test_the_prefix_cache_never_gives_one_question_the_rows_of_another(llm, hooked):
    sources = [captured(llm, text) for text in ("the parrot", "the dagger")]
    rows = [hooked.rows(source.prompt_token_ids, FROM) for source in sources]
    cached = []
    start = "You are shown what another run of you computed. "
    for index in (0, 1, 0, 1, 1, 0):
        (output,) = ask(llm, sources[index], template=start + TEMPLATE)
        assert_answers(output, hooked, rows[index], start + content(len(rows[index])))
        cached.append(output.num_cached_tokens)
    plain = llm.generate({"prompt_token_ids": output.prompt_token_ids}, params(), use_tqdm=False)
    tokens, _ = hooked.answer(output.prompt_token_ids, INTO, lambda h: None, LENGTH)
    assert list(plain[0].outputs[0].token_ids) == tokens
    first = output.prompt_token_ids.index(hooked.tokenizer.convert_tokens_to_ids(" ?"))
    # What comes before the rows is shared; all whole blocks are, of the same rows.
    shared, whole = first // BLOCK * BLOCK, (len(output.prompt_token_ids) - 1) // BLOCK * BLOCK
    assert cached == [0, shared, whole, whole, whole, whole]
    assert 0 < shared < whole


def test_an_adapter_answers_about_rows_of_the_model(llm, hooked, model, adapter, tmp_path):
    from vllm.lora.request import LoRARequest

    merged = Hooked(model, adapters.merge(model, adapter, tmp_path))
    source = captured(llm)
    rows = hooked.rows(source.prompt_token_ids, FROM)
    oracle = LoRARequest("oracle", 1, str(adapter))
    (by_adapter,) = ask(llm, source, lora_request=oracle)
    assert_answers(by_adapter, merged, rows, content(len(rows)))
    (by_model,) = ask(llm, source)
    assert_answers(by_model, hooked, rows, content(len(rows)))
    assert by_adapter.outputs[0].token_ids != by_model.outputs[0].token_ids


def test_a_wrong_question_is_refused_before_a_request_by_its_argument(llm):
    source = captured(llm)
    rows = source.activations["resid_post", FROM]
    plain = llm.generate("a", params(1), use_tqdm=False)[0]
    refused(
        lambda case: ask(llm, **{"sources": source, **case}),
        (
            {"layer": 1},
            "layer",
            "no rows of resid_post at layer 1 .* resid_post at layer 2",
        ),
        ({"layer": -1}, "layer", "from 0 on, got -1"),
        ({"site": "mlp_out"}, "layer", "no rows of mlp_out at layer 3"),
        ({"site": "middle"}, "site", "unknown site 'middle'"),
        ({"positions": [0, 99]}, "positions", "at position 99; there are 0, 1, 2"),
        ({"positions": [0, 0]}, "positions", "twice"),
        ({"sources": rows, "positions": 1}, "positions", "have no positions"),
        ({"sources": rows[:, :5]}, "sources", "expected 64 numbers"),
        ({"sources": rows[None]}, "sources", r"\[rows, width\], got shape \[1, "),
        ({"sources": rows[:0]}, "sources", "expected at least one row, got none"),
        ({"sources": []}, "sources", "at least one, got none"),
        ({"sources": [source, plain]}, "sources", r"capture=Capture.* \(of sources\[1\]\)"),
        ({"sources": plain}, "sources", "it has no activations; capture them"),
        ({"sources": "a text"}, "sources", "got `str`"),
        ({"sources": {"captured": "abc"}}, "sources.rows.captured", "in a request to that server"),
        ({"sources": torch.zeros(2, HIDDEN)}, "sources", "all rows are zero"),
        ({"question": 3}, "question", "expected a text, got 3"),
        ({"question": ["a", ""]}, "question[1]", "expected a text, got ''"),
        ({"question": ["a", "b"], "sources": [source] * 3}, "question", "2 for 3 sources"),
        ({"into": 9}, "into", "9"),
        ({"mode": "patch"}, "mode", "'patch'"),
        ({"norm": "keep"}, "norm", "'keep'"),
        ({"template": "{question}"}, "template", "expected {rows} in it once"),
        ({"template": 3}, "template", "expected a text, got `int`"),
        ({"placeholder": " "}, "placeholder", "other characters than whitespace"),
        ({"placeholder": " the"}, "placeholder", "are .* tokens of this model, and there are"),
        ({"placeholder": "@"}, "placeholder", "are 8 tokens of this model, and there are 16 rows"),
        ({"question": "is ? it", "positions": 1}, "placeholder", "' \\?' is in the message twice"),
        ({"think": True}, "think", "ask\\(\\) has no such argument"),
    )


def test_a_placeholder_that_the_template_has_too_is_refused(llm):
    template = "Is it ? {{ messages[0].content }}"
    with pytest.raises(SpecError, match="more than once in the prompt") as caught:
        ask(llm, captured(llm), positions=1, chat_template=template)
    assert caught.value.path == "placeholder"
    with pytest.raises(SpecError, match="is not in the prompt"):
        ask(llm, captured(llm), chat_template="{{ messages[0].content[:3] }}")
