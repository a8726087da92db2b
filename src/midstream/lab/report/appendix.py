"""Sections at the end of the page: the vector and code, prompts, and receipts."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from midstream.lab.report.result import RequestReceipt, Result
from midstream.viz.answer_cards import strength
from midstream.viz.markup import escape, tag

_KINDS = {
    "pair": "texts of the pairs, captured",
    "question": "answers, generated",
    "reading": "answers, read without steering",
}


def take_section(result: Result) -> str:
    """The directions to download, and code that steers with them."""
    words = (
        "The directions of all layers with their midpoints and scores, as a safetensors file that"
        " Directions.load reads{}. Files are in this page; nothing is fetched."
    )
    links = _download(file_name(result), result.vectors)
    if result.gguf is None:
        other = " (the package gguf, which writes control vectors of llama.cpp, was not installed)"
    else:
        other = ", and those of layers 1 and up as a control vector of llama.cpp and repeng (GGUF)"
        links += " " + _download(file_name(result, "gguf"), result.gguf)
    code = tag("pre", tag("code", escape(python_code(result))), tabindex="0")
    command = tag("pre", tag("code", escape(result.command)), tabindex="0")
    again = tag("p", "The command that made this page:") + command if result.command else ""
    return (
        tag("p", escape(words.format(other)))
        + tag("p", links)
        + tag("p", "Steer with it, in the folder of the file:")
        + code
        + again
    )


def _download(name: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return tag(
        "a",
        f"Download {escape(name)}",
        "download",
        download=name,
        href=f"data:application/octet-stream;base64,{data}",
    )


def file_name(result: Result, ending: str = "safetensors") -> str:
    """Return the name of the downloaded file, of plain characters."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", result.classes[0]).strip("-")[:40]
    return f"{word or 'directions'}.{ending}"


def python_code(result: Result) -> str:
    """Return a script that answers the first question with the downloaded file."""

    def text(value: Any) -> str:
        return json.dumps(value) if isinstance(value, str) else repr(value)

    arguments = "".join(f", {name}={text(value)}" for name, value in result.arguments.items())
    strongest = max(result.scales) or min(result.scales)  # not 0, also of negative ones alone
    return (
        "from midstream import LLM, Directions, SamplingParams\n\n"
        f"llm = LLM({text(result.source)}{arguments})\n"
        f'direction = Directions.load("{file_name(result)}")[{result.layer}]\n'
        f"params = SamplingParams(temperature=0, max_tokens={result.max_tokens})\n"
        f"question = {text(result.questions[0].prompt)}\n"
        'chat = [{"role": "user", "content": question}]\n'
        f'steer = direction.steer({strongest!r}, phase="all")\n'
        "print(llm.chat(chat, params, steer=steer)[0].outputs[0].text)\n"
    )


def prompts_section(result: Result) -> str:
    positive, negative = result.classes
    words = (
        f"{len(result.pairs)} pairs, captured as plain text at the last token, and"
        f" {len(result.questions)} questions, asked as chats at the strengths"
        f" {', '.join(strength(scale) for scale in result.scales)}."
    )
    pairs = _table(
        ["", positive, negative],
        [[str(number), *pair] for number, pair in enumerate(result.pairs, 1)],
    )
    questions = _table(
        ["", "question"],
        [[str(number), question.prompt] for number, question in enumerate(result.questions, 1)],
    )
    return (
        tag("p", escape(words))
        + tag("details", tag("summary", "Pairs") + pairs)
        + tag("details", tag("summary", "Questions") + questions)
    )


def receipts_section(result: Result) -> str:
    """What was requested and done, by kind of request, and each receipt with a problem."""
    receipts = result.receipts
    captured = sum(_count_rows(receipt.content)[0] for receipt in receipts)
    edited = sum(_count_edits(receipt.content)[0] for receipt in receipts)
    bad = [receipt for receipt in receipts if receipt.content.get("status") != "ok"]
    words = (
        f"{len(receipts)} requests captured or steered: {captured:,} vectors captured,"
        f" {edited:,} edits made. "
        + (f"{len(bad)} of them differ from the request." if bad else "All did what was requested.")
        + " A receipt counts what a request asked for against what the device did."
    )
    kinds: dict[str, list[RequestReceipt]] = {}
    for receipt in receipts:
        kinds.setdefault(receipt.request.partition(" ")[0], []).append(receipt)
    rows = [
        [
            _KINDS.get(kind, kind),
            f"{sum(receipt.content.get('status') == 'ok' for receipt in some)} of {len(some)}",
            _of(_sum(_count_rows, some)),
            _of(_sum(_count_edits, some)),
        ]
        for kind, some in kinds.items()
    ]
    section = tag("p", escape(words)) + _table(["requests", "ok", "vectors", "edits"], rows)
    if bad:
        names = ["request", "status", "vectors", "edits", "problems"]
        section += _table(names, [_receipt_cells(receipt) for receipt in bad])
    return section


def _receipt_cells(receipt: RequestReceipt) -> list[str]:
    content = receipt.content
    return [
        receipt.request,
        str(content.get("status", "no receipt")),
        _of(_count_rows(content)),
        _of(_count_edits(content)),
        "; ".join(content.get("problems", ())),
    ]


def _sum(count: Any, receipts: list[RequestReceipt]) -> tuple[int, int]:
    pairs = [count(receipt.content) for receipt in receipts]
    return sum(done for done, _ in pairs), sum(wanted for _, wanted in pairs)


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} of {counts[1]:,}" if counts[1] else ""


def _count_rows(content: dict[str, Any]) -> tuple[int, int]:
    captured = content.get("captured") or ()
    return sum(c["actual"] for c in captured), sum(c["expected"] for c in captured)


def _count_edits(content: dict[str, Any]) -> tuple[int, int]:
    edited = content.get("edited") or {"applied": 0, "expected": 0}
    return edited["applied"], edited["expected"]


def _table(names: list[str], rows: list[list[str]]) -> str:
    head = tag("tr", "".join(tag("th", escape(name), scope="col") for name in names))
    body = "".join(
        tag("tr", "".join(tag("td", escape(cell), dir="auto") for cell in row)) for row in rows
    )
    return tag("div", tag("table", head + body), "scroll", tabindex="0")
