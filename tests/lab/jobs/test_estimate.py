"""`midstream capture --estimate`: exact numbers from a configuration and a tokenizer alone."""

import io
import json
import shutil
import subprocess
import sys

import pytest
import transformers as hf
from lab.jobs.fakes import job, write_lines
from support.command import CliRunner
from support.tokenizers import byte_level

from midstream.cli.app import app
from midstream.errors import SpecError
from midstream.lab.jobs import estimate as module
from midstream.lab.jobs.estimate import estimate_job
from midstream.plan import Capture, Role

# Every byte of these is a token.
TEXTS = ["abcd", "ab", "abcdefg"]
HIDDEN, LAYERS = 8, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a configuration and a tokenizer, and without weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.save_pretrained(folder)
    hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
    ).save_pretrained(folder)
    return str(folder)


def of(folder, model, **fields):
    if not (folder / "prompts.jsonl").exists():
        write_lines(folder, TEXTS)
    return estimate_job(job(folder, model=model, **fields))


def test_rows_and_bytes_are_exact(model, tmp_path):
    capture = Capture([0, -1], ["resid_post", "mlp_out"], "prompt")
    found = of(tmp_path, model, capture=capture)
    assert (found.lines, found.failed, found.problem) == (3, 0, "")
    assert found.token_bytes == 4 * 2 * HIDDEN
    assert found.rows == 4 * (4 + 2 + 7)
    assert found.nbytes == (4 + 2 + 7) * found.token_bytes
    assert found.stored_bytes == found.nbytes + 13 * module.TOKEN_BYTES + 3 * module.LINE_BYTES
    assert 0 < found.free_bytes <= shutil.disk_usage(tmp_path).total
    assert not (tmp_path / "acts").exists()


@pytest.mark.parametrize(
    ("fields", "rows", "token_bytes"),
    [
        ({"capture": Capture("all", positions="last_prompt")}, 9, 48),
        ({"capture": Capture("all", positions="all"), "max_tokens": 4}, 3 * (13 + 9), 48),
        ({"capture": Capture(0, positions="generated"), "max_tokens": 4}, 9, 16),
        # Of "ab" both positions are one, and its line fails.
        ({"capture": Capture(0, positions=[0, -2])}, 2 + 0 + 2, 16),
        ({"capture": Capture(0, positions={"text": "cd"})}, 4, 16),
        ({"capture": Capture(0, positions="prompt", max_rows=3)}, 3 + 2 + 3, 16),
        ({"capture": Capture(None, ["embed", "final_norm"], "prompt")}, 2 * 13, 32),
        ({"capture": Capture(0, positions="prompt", codec="full8")}, 13, HIDDEN + 8),
        ({"capture": Capture(0, positions="prompt"), "dtype": "float32"}, 13, 32),
        ({"capture": Capture(0, positions="prompt"), "dtype": "half"}, 13, 16),
        ({"capture": Capture(0, positions="prompt"), "limit": 1}, 4, 16),
    ],
)
def test_positions_codecs_and_dtypes_count_as_in_a_job(model, tmp_path, fields, rows, token_bytes):
    found = of(tmp_path, model, **fields)
    assert (found.rows, found.token_bytes) == (rows, token_bytes)


TALK = [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("fields", "prompts", "tokens", "failed"),
    [
        ({"truncate": 3}, 3, 3 + 2 + 3, 0),
        ({"exclude": "first"}, 3, 3 + 1 + 6, 0),
        # "abcd", "|", "ab", "|": 8; the first of each document has no row.
        ({"pack": 8, "separator": 0}, 2, 13, 0),
        # And the first of the second prompt, in which the third document goes on.
        ({"pack": 10, "separator": 0, "exclude": "first"}, 2, 3 + 1 + 1 + 4, 0),
        ({"pack": 8, "separator": 0, "truncate": 2}, 1, 6, 0),
        ({"pack": 8, "separator": 0, "capture": Capture(0, positions=-3)}, 2, 2, 1),
    ],
)
def test_cut_and_packed_prompts_count_as_in_a_job(model, tmp_path, fields, prompts, tokens, failed):
    fields = {"capture": Capture(0, positions="prompt"), **fields}
    found = of(tmp_path, model, **fields)
    assert (found.lines, found.prompts, found.rows, found.failed) == (3, prompts, tokens, failed)


def test_roles_of_packed_conversations_take_space_and_select_rows(model, tmp_path):
    write_lines(tmp_path, [{"messages": TALK}] * 3)
    capture = Capture(0, positions=Role("assistant", "all"))
    found = of(tmp_path, model, capture=capture, chat=True, roles=True, pack=64, separator=0)
    assert (found.prompts, found.rows, found.failed) == (2, 9, 0)
    parts = found.stored_bytes - found.nbytes - found.rows * module.TOKEN_BYTES
    assert parts > 2 * module.LINE_BYTES + 100


def test_lines_with_images_are_refused(model, tmp_path):
    part = {"type": "image_url", "image_url": "data:image/png;base64,AAEC"}
    write_lines(tmp_path, [{"messages": "a"}, {"messages": [{"role": "user", "content": [part]}]}])
    with pytest.raises(SpecError, match="data: line 2: only an engine knows how many tokens"):
        of(tmp_path, model, chat=True)


def test_a_conversation_is_written_out_by_the_template(model, tmp_path):
    write_lines(tmp_path, ["abcde", {"messages": [{"role": "user"}]}])
    user = Capture(0, positions=[{"role": "user"}])
    assert of(tmp_path, model, capture=user, chat=True).rows == len("abcde")
    whole = of(tmp_path, model, capture=Capture(0, positions="prompt"), chat=True, limit=1)
    # Each of the template's three marks is one token.
    assert whole.rows == 3 + len("user\nabcde\nassistant\n")


def test_lines_without_rows_are_counted_and_those_after_the_sample_count_as_its_average(
    model, tmp_path, monkeypatch
):
    write_lines(tmp_path, ["abcdefg", {"prompt": "x"}, "ab", b"?", ""])
    found = of(tmp_path, model, capture=Capture(0, positions=[4]))
    assert (found.lines, found.failed, found.rows) == (5, 4, 1)
    assert found.problem == "line 2: the field 'text' is missing; found `prompt`"
    monkeypatch.setattr(module, "SAMPLE", 4)
    write_lines(tmp_path, ["abcd", "ab", b"?", "abcdef"] + ["abc"] * 4)
    found = of(tmp_path, model, capture=Capture(0, positions="prompt"))
    assert (found.lines, found.failed, found.rows) == (8, 2, 2 * 12)


def test_a_stream_longer_than_the_sample_needs_a_limit(model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 2)
    lines = write_lines(tmp_path, ["abcd"] * 6).read_bytes()
    for limit in (None, 5):
        monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": io.BytesIO(lines)}))
        if limit is None:
            with pytest.raises(SpecError, match="limit: the number of lines of - is unknown"):
                of(tmp_path, model, data="-")
        else:
            assert of(tmp_path, model, data="-", limit=limit).lines == 5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "/nowhere"}, "model: there is no folder '/nowhere'"),
        ({"capture": Capture(3)}, "layers: layer 3 is out of range: the model has 3 layers"),
        ({"capture": Capture(0, ["resid_post", "z"])}, "sites: only an engine knows the width of"),
        ({"engine_args": {"hf_overrides": {}}}, "engine_args.hf_overrides: an estimate reads the"),
        ({"dtype": "float8"}, "dtype: expected .*bfloat16.*, got float8"),
        ({"data": "nothing.jsonl"}, "data: there is no file 'nothing.jsonl'"),
    ],
)
def test_what_is_wrong_is_refused_by_name(model, tmp_path, fields, said):
    with pytest.raises(SpecError, match=said):
        of(tmp_path, **({"model": model} | fields))


def command(folder, model, *arguments):
    given = ["--data", str(folder / "prompts.jsonl"), "--out", str(folder / "acts")]
    result = CliRunner().invoke(app, ["capture", model, "--layers", "0,2", *given, *arguments])
    return result.exit_code, result.output


def test_the_command_tells_it_and_writes_nothing(model, tmp_path):
    write_lines(tmp_path, [*TEXTS, {"n": 1}])
    options = ("--positions", "prompt", "--estimate", "--write-rate", "0.000001")
    status, said = command(tmp_path, model, *options)
    assert status == 1
    first, second, third, rate, failed = said.splitlines()
    assert first == "3 of 4 lines: at most 26 rows"
    assert second == "32 bytes per token, 0.0 MB in all"
    assert third.startswith(f"{tmp_path}/acts: about 0.0 MB, ")
    assert rate == "at 1e-06 GB/s writing takes at least 0:00:03"
    assert (
        failed == "1 will fail, the first one for: line 4: the field 'text' is missing; found `n`"
    )
    assert not (tmp_path / "acts").exists()


def test_too_little_space_is_status_1_and_an_object_store_is_not_asked_for_it(
    model, tmp_path, monkeypatch
):
    assert of(tmp_path, model, out="s3://bucket/acts").free_bytes is None
    monkeypatch.setattr(module, "_free_bytes", lambda out: 100)
    status, said = command(tmp_path, model, "--estimate", "--json", "--write-rate", "0.001")
    found = json.loads(said)
    assert status == found["status"] == 1
    assert (found["free_bytes"], found["seconds"]) == (100, found["stored_bytes"] / 1e6)


@pytest.mark.parametrize(
    "arguments", [["--write-rate", "2"], ["--estimate", "--write-rate", "0"], ["--estimate=1"]]
)
def test_a_rate_needs_an_estimate_and_a_number_above_zero(model, tmp_path, arguments):
    write_lines(tmp_path, TEXTS)
    assert command(tmp_path, model, *arguments)[0] == 2


# Seven seconds, in which a process imports transformers.
@pytest.mark.nightly
def test_it_imports_no_vllm(model, tmp_path):
    write_lines(tmp_path, TEXTS)
    code = (
        "import sys; from midstream.lab.jobs import Job; from midstream.plan import Capture;"
        "from midstream.lab.jobs.estimate import estimate_job;"
        "job = Job(model=sys.argv[1], data='prompts.jsonl', out='acts', capture=Capture(0));"
        "estimate_job(job);"
        "print('vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, model], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr
