"""Sentences that the demo captures at their end (`pairs.jsonl`), and questions that it asks."""

from __future__ import annotations

from pathlib import Path

from midstream.lab.report.pairs import read_pairs

POSITIVE, NEGATIVE = "glad", "sad"

PAIRS = tuple(read_pairs(Path(__file__).with_name("pairs.jsonl")))

QUESTIONS: tuple[str, ...] = (
    "How do you feel today?",
    "Write a short diary entry about today.",
    "Tell me about your neighbour.",
    "Write a short message to a friend.",
    "What did you dream last night?",
    "Describe the sea in two sentences.",
)
"""Chat messages. They are neither glad nor sad, so the feeling of an answer is the steering's."""

SHOWN_PAIR = 10
"""Index in `PAIRS` of the pair that the report shows token by token."""
