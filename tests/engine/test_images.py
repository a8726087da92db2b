"""Positions in prompts with images, on tiny vision-language models, compared with transformers."""

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lab.jobs.fakes import job, write_lines
from support import vision
from support.engines import engine, greedy
from support.pages import blocks
from support.sinking import AsTheyCome, Keeping

from midstream import Capture, Image, Probe, Role, Steer, Text, open_store
from midstream.errors import SpecError, StoreError
from midstream.lab.jobs import capture_dataset
from midstream.lab.jobs.engine import VllmEngine
from midstream.plan import Media, Positions

LAYER = 1
TOLERANCE = 1e-4
VECTOR = 4 * torch.randn(vision.HIDDEN, generator=torch.Generator().manual_seed(3))
SITES = ["embed", "resid_pre", "resid_post"]
EVERY = Capture("all", ["resid_pre", "resid_post"])


class Served(NamedTuple):
    llm: Any
    oracle: vision.VisionOracle
    mark: str
    sinks: dict[str, Keeping]


@pytest.fixture(scope="module", params=list(vision.MODELS))
def served(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[Served]:
    name = request.param
    path = vision.make(name, tiny_models)
    oracle = vision.VisionOracle(name, path)
    sinks = {"ended": Keeping(), "pieces": AsTheyCome()}
    settings = {
        "max_model_len": 512,
        "limit_mm_per_prompt": {"image": 2, "video": int(name == "qwen3vl")},
        "midstream": {"sites": SITES, "sinks": sinks},
    }
    with engine(vision.served(path), **settings) as llm:
        yield Served(llm, oracle, vision.MODELS[name].mark, sinks)


def ask(served: Served, text: str, seeds: list[int], **plan: Any) -> Any:
    pictures = [vision.picture(seed) for seed in seeds]
    prompt = {"prompt": text, "multi_modal_data": {"image": pictures}} if seeds else text
    return served.llm.generate([prompt], greedy(3), use_tqdm=False, **plan)[0]


def far(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    assert rows.shape == wanted.shape
    return float(((rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def test_rows_at_an_image_are_those_of_its_embeddings(served):
    text = f"the {served.mark} is in the hat"
    capture = [Capture("all", ["embed", "resid_post"], positions=Image(0))]
    output = ask(served, text, [1], capture=capture)
    inputs = served.oracle.inputs(text, [vision.picture(1)])
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    places = served.oracle.media_tokens(inputs)
    rows, _ = served.oracle.run(inputs)
    assert len(places) >= 4
    assert output.activations.positions_of("resid_post", 2).tolist() == places
    for layer in range(vision.LAYERS):
        assert (
            far(output.activations["resid_post", layer], rows["resid_post", layer][places]) < 1e-4
        )
    assert far(output.activations["embed"], rows["resid_pre", 0][places]) < TOLERANCE
    (item,) = output.activations.positions_of_media
    assert (item.kind, item.index) == ("image", 0)
    assert item.first <= places[0]
    assert places[-1] < item.first + item.length <= len(output.prompt_token_ids)


def test_an_edit_at_all_images_is_a_hook_at_their_tokens(served):
    text = f"{served.mark} and {served.mark} in the hat"
    edit = Steer(VECTOR, LAYER, positions=Image("all"))
    output = ask(served, text, [1, 2], capture=[EVERY], edits=[edit])
    answer = list(output.outputs[0].token_ids)
    pictures = [vision.picture(1), vision.picture(2)]
    inputs = served.oracle.inputs(text, pictures, answer[:-1])
    places = served.oracle.media_tokens(inputs)
    rows, logits = served.oracle.run(inputs, LAYER, dict.fromkeys(places, VECTOR))
    for tap, wanted in rows.items():
        assert far(output.activations[tap], wanted) < TOLERANCE, tap
    last = len(output.prompt_token_ids) - 1
    assert answer == logits[last:].argmax(-1).tolist()
    plain, _ = served.oracle.run(inputs)
    assert far(plain["resid_post", 3][last:], rows["resid_post", 3][last:]) > 0.01


def test_one_of_two_images_is_selected_and_combined_with_others(served):
    text = f"the {served.mark} and {served.mark} in the hat"
    pictures = [vision.picture(1), vision.picture(2, 84, 140)]
    prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
    inputs = served.oracle.inputs(text, pictures)
    places = served.oracle.media_tokens(inputs)
    count = next(at for at in range(1, len(places)) if places[at] != places[at - 1] + 1)
    first, second = places[:count], places[count:]
    decode = served.llm.get_tokenizer().decode
    ids = inputs["input_ids"][0].tolist()
    selected = {
        "first": (Image(0), first),
        "second": (Image(-1), second),
        "media": (Media(1, "image"), second),
        "both": (Image("all"), places),
        "json": ({"image": 1}, second),
        "with.text": ([Image(0), Text(" and "), 0], None),
        "without": (Positions("prompt", exclude=Image("all")), None),
    }
    probes = [
        Probe(VECTOR, layer=2, name=name, positions=where) for name, (where, _) in selected.items()
    ]
    output = served.llm.generate([prompt], greedy(1), probes=[probes], use_tqdm=False)[0]
    found = {name: output.probes.positions_of(name).tolist() for name in selected}
    for name, (_, wanted) in selected.items():
        assert wanted is None or found[name] == wanted, name
    capture = [Capture([2], positions=[0, Image(1)], reduce="norm"), Capture([1])]
    rows = served.llm.generate([prompt], greedy(1), capture=[capture], use_tqdm=False)[0]
    items = rows.activations.positions_of_media
    assert [(item.kind, item.index) for item in items] == [("image", 0), ("image", 1)]
    assert items[0].first <= first[0] <= first[-1] < items[0].first + items[0].length
    assert items[1].first <= second[0] <= second[-1] < items[1].first + items[1].length
    assert rows.activations.copy().positions_of_media == items
    capture = [Capture([1], positions="all", sink=name) for name in served.sinks]
    served.llm.generate([prompt], greedy(3), capture=[capture], use_tqdm=False)
    for name, sink in served.sinks.items():
        assert sink.given, name
        assert {each.activations.positions_of_media for each in sink.given} == {items}, name
    others = sorted(set(range(len(ids))) - set(places))
    assert found["without"] == others
    between = [place for place in found["with.text"] if place not in first]
    assert between[0] == 0
    assert set(between) < set(others)
    assert decode([ids[place] for place in between[1:]]) == " and "


@pytest.mark.parametrize(
    ("where", "seeds", "problem"),
    [
        (Image(1), [1], "image 1 is out of range: the prompt has 1 of this kind, expected 0 to 0"),
        (Image(-2), [1], "image -2 is out of range"),
        (Image("all"), [], "Image..all.. selects nothing: the prompt has no image .prompt 0."),
        (Media(0, "audio"), [1], "the prompt has no audio; it has image"),
    ],
)
def test_media_that_a_prompt_lacks_are_refused(served, where, seeds, problem):
    text = f"the {served.mark} is" if seeds else "the hat"
    with pytest.raises(SpecError, match=f"edits.0..positions.*{problem}"):
        ask(served, text, seeds, edits=[Steer(VECTOR, LAYER, positions=where)])


def test_the_frames_of_a_video_are_selected_without_the_times_between_them(served):
    if not served.mark.startswith("<|vision_start|>"):
        pytest.skip("this model has no videos")
    frames = np.stack([np.asarray(vision.picture(seed, 64, 64)) for seed in range(4)])
    about = {
        "fps": 2.0,
        "duration": 2.0,
        "total_num_frames": 4,
        "frames_indices": [0, 1, 2, 3],
        "video_backend": "opencv",
    }
    given = (frames, {**about, "do_sample_frames": False})
    mark = served.mark.replace("image", "video")
    prompt = {
        "prompt": f"{served.mark} and {mark} in the hat",
        "multi_modal_data": {"image": [vision.picture(1)], "video": [given]},
    }
    wheres = {"video": Media(0, "video"), "image": Image(0), "both": [Image(0), {"video": -1}]}
    probes = [Probe(VECTOR, layer=2, name=name, positions=where) for name, where in wheres.items()]
    output = served.llm.generate(
        [prompt], greedy(1), probes=[probes], capture=[EVERY], use_tqdm=False
    )[0]
    inputs = served.oracle.with_video(
        prompt["prompt"], prompt["multi_modal_data"]["image"], frames, about
    )
    assert inputs["input_ids"][0].tolist() == output.prompt_token_ids
    rows, _ = served.oracle.run(inputs)
    for tap, row in rows.items():
        assert far(output.activations[tap], row) < TOLERANCE, tap
    found = {name: output.probes.positions_of(name).tolist() for name in wheres}
    ids = output.prompt_token_ids
    image, video = served.llm.get_tokenizer().convert_tokens_to_ids(
        ["<|image_pad|>", "<|video_pad|>"]
    )
    assert found["video"] == [place for place, token in enumerate(ids) if token == video]
    assert found["image"] == [place for place, token in enumerate(ids) if token == image]
    assert found["both"] == sorted(found["image"] + found["video"])
    # Each of two pairs of frames has a time before it.
    first, last = found["video"][0], found["video"][-1]
    assert last - first + 1 > len(found["video"]) > 4
    spans = output.activations.positions_of_media
    assert [(span.kind, span.index) for span in spans] == [("image", 0), ("video", 0)]
    assert spans[1].first <= first < last < spans[1].first + spans[1].length


def test_the_example_of_the_documents_runs(served):
    [example] = [
        text
        for _, _, text in blocks("docs/selecting.md", ["python"])
        if text.startswith("# needs a vision-language model")
    ]
    names: dict[str, Any] = {
        "llm": served.llm,
        "params": greedy(2),
        "v": VECTOR,
        "mark": served.mark,
        "cat": vision.picture(1),
        "owl": vision.picture(2),
    }
    exec(compile(example, "docs/selecting.md", "exec"), names)
    output = names["out"]
    items = output.activations.positions_of_media
    assert [item.index for item in items] == [0, 1]
    assert output.activations["embed"].shape == output.activations["resid_post", 3].shape
    assert output.receipt.status == "ok"


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CHAT = [
    {"role": "system", "content": "be terse"},
    {"role": "user", "content": [said("what is"), vision.url_part(1), said("in the hat?")]},
    {"role": "assistant", "content": "an owl"},
    {"role": "user", "content": [vision.url_part(2), said("and there?")]},
    {"role": "assistant", "content": "an owl"},
    {"role": "user", "content": "the end"},
]


def test_messages_of_a_chat_with_images_are_selected_and_images_loaded_once(served, monkeypatch):
    from vllm.multimodal.media.connector import MediaConnector

    loaded = []
    load = MediaConnector.load_from_url

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        loaded.append(args)
        return load(self, *args, **named)

    monkeypatch.setattr(MediaConnector, "load_from_url", counted)
    roles = {
        "system": (Role("system"), "be terse"),
        "first": (Role("user", 0), "what isIMAGEin the hat?"),
        "second": (Role("user", 1), "IMAGEand there?"),
        "last_row": (Role("user"), "the end"),
        "answers": (Role("assistant", "all"), "an owlan owl"),
        "text": (Text("in the hat?"), "in the hat?"),
        "image": (Image(1), "IMAGE"),
    }
    probes = [
        Probe(VECTOR, layer=2, name=name, positions=where) for name, (where, _) in roles.items()
    ]
    output = served.llm.chat(CHAT, greedy(1), probes=[probes], use_tqdm=False)[0]
    assert len(loaded) == 2
    ids, tokenizer = output.prompt_token_ids, served.llm.get_tokenizer()
    found = {name: output.probes.positions_of(name).tolist() for name in roles}
    for name, (_, wanted) in roles.items():
        spelt = tokenizer.decode([ids[place] for place in found[name]])
        if "IMAGE" not in wanted:
            assert spelt == wanted, name
            continue
        before, after = wanted.split("IMAGE")
        assert spelt.startswith(before), name
        assert spelt.endswith(after), name
    assert set(found["image"]) < set(found["second"])
    spelt = tokenizer.decode([ids[place] for place in found["second"]])
    assert spelt.startswith(served.mark.split("<|image_pad|>")[0].strip()) or spelt.startswith("\n")
    # The marks of both ends belong to the message, the template's header does not.
    assert "user" not in spelt
    assert "<|im_end|>" not in spelt


def _large_png() -> bytes:
    """Return a file that says that it has more pixels than Pillow opens."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)), (b"IDAT", b"")]
    whole = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    ]
    return b"".join([b"\x89PNG\r\n\x1a\n", *whole])


def test_a_dataset_capture_stores_chats_with_images_and_where_these_are(
    served: Served, tmp_path: Path
) -> None:
    def asked(url: str) -> list[dict[str, Any]]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [said("what is"), part, said("in the hat?")]}]

    allowed, other = tmp_path / "allowed", tmp_path / "other.png"
    allowed.mkdir()
    for path in (allowed / "owl.png", other):
        vision.picture(2).save(path)
    (allowed / "text.png").write_text("no image")
    (allowed / "link.png").symlink_to(other)
    written = {
        "chat": CHAT,
        "data": asked(vision.url_part(2)["image_url"]["url"]),
        "file": asked((allowed / "owl.png").as_uri()),
        "text": [{"role": "user", "content": "the end"}],
        "http": asked("http://127.0.0.1:9/owl.png"),
        "outside": asked(other.as_uri()),
        "link": asked((allowed / "link.png").as_uri()),
        "broken": asked("data:image/png;base64,iVBO=="),
        "no image": asked((allowed / "text.png").as_uri()),
        "bomb": asked(f"data:image/png;base64,{base64.b64encode(_large_png()).decode()}"),
        "three": asked(vision.url_part(1)["image_url"]["url"])[:1] + CHAT,
    }
    write_lines(tmp_path, [{"messages": chat} for chat in written.values()])
    capture = Capture("all", ["embed", "resid_post"], "prompt")
    mine = job(
        tmp_path,
        chat=True,
        capture=capture,
        engine_args={"allowed_local_media_path": str(allowed)},
    )
    summary = capture_dataset(mine, lambda job: VllmEngine(served.llm, job))
    failed = {}
    for line in (tmp_path / "acts" / "errors.jsonl").read_text().splitlines():
        reason = json.loads(line)
        failed[list(written)[reason["line"] - 1]] = reason["reason"]
    assert "expected a `data:` URL in base64, or a `file://` URL" in failed.pop("http")
    assert "is not in `allowed_local_media_path`" in failed.pop("outside")
    assert "is not in `allowed_local_media_path`" in failed.pop("link")
    assert "At most 2 image" in failed.pop("three")
    assert "DecompressionBombError" in failed.pop("bomb")
    assert set(failed) == {"broken", "no image"}, failed
    assert (summary.counts.stored, summary.counts.failed) == (4, 7)
    store = open_store(tmp_path / "acts")
    stored = {list(written)[request.metadata["line"] - 1]: request for request in store.requests}
    for name, request in stored.items():
        live = served.llm.chat(written["data"] if name == "file" else written[name], greedy(1),
                               capture=[capture], use_tqdm=False)[0].activations  # fmt: skip
        rows = request.activations()
        assert rows.positions_of_media == live.positions_of_media
        for tap, wanted in live.items():
            assert torch.equal(rows.positions_of(*tap), live.positions_of(*tap))
            assert far(rows[tap], wanted) < TOLERANCE, (name, tap)
        batch = store.select(site="embed", request=request.request).take(range(len(rows.positions)))
        for span in rows.positions_of_media:
            found = [place for place, each in enumerate(batch.media) if each == span]
            assert found == list(range(span.first, span.first + span.length))
    owl, other_owl = stored["chat"].activations().positions_of_media
    assert owl.hash != other_owl.hash != ""
    for name in ("data", "file"):
        (span,) = stored[name].activations().positions_of_media
        assert span.hash == other_owl.hash
    assert stored["text"].activations().positions_of_media == ()
    # The id of a line is of what its files hold.
    vision.picture(1).save(allowed / "owl.png")
    with pytest.raises(StoreError, match="line 3 was captured with another prompt"):
        capture_dataset(replace(mine, resume=True), lambda job: VllmEngine(served.llm, job))
