"""Sentences that the demo captures, and questions that it asks.

Each pair is one small scene with a glad and a sad end. Its two sentences have nearly the same
words, so that their activations differ by the feeling more than by the topic. They are captured
as plain text, at the last token: the full stop, whose vector depends on the whole sentence.
"""

from __future__ import annotations

from midstream.report.pairs import Pair

POSITIVE, NEGATIVE = "glad", "sad"

PAIRS: tuple[Pair, ...] = (
    Pair(
        "My daughter took her first steps this morning.",
        "My daughter was rushed to hospital this morning.",
    ),
    Pair("I just found out that I got the job.", "I just found out that I lost my job."),
    Pair("We won the final in the last minute.", "We lost the final in the last minute."),
    Pair("The doctor called: the tumour is gone.", "The doctor called: the tumour is back."),
    Pair(
        "My best friend is coming home after two years away.",
        "My best friend died after two years of illness.",
    ),
    Pair(
        "She said yes when I asked her to marry me.",
        "She said no when I asked her to marry me.",
    ),
    Pair("Our dog ran to greet me at the door.", "Our dog was hit by a car at the door."),
    Pair("The whole family sang for my birthday.", "The whole family forgot my birthday."),
    Pair(
        "I passed the exam with the best mark in my class.",
        "I failed the exam with the worst mark in my class.",
    ),
    Pair(
        "The garden is full of flowers after the rain.",
        "The garden is ruined and dead after the flood.",
    ),
    Pair(
        "My novel was accepted by a publisher today.",
        "My novel was rejected by every publisher today.",
    ),
    Pair(
        "We are leaving tomorrow for the holiday we dreamed of.",
        "We are cancelling the holiday that we dreamed of.",
    ),
    Pair(
        "Grandma laughed and hugged every one of us.",
        "Grandma cried and did not know any of us.",
    ),
    Pair(
        "They brought me home-made soup when I was ill.",
        "Nobody came to see me when I was ill.",
    ),
    Pair("The baby was born healthy last night.", "The baby was lost last night."),
    Pair("I finally paid back all of my debts.", "I can no longer pay any of my debts."),
    Pair(
        "My brother and I made peace and talked for hours.",
        "My brother and I had a bitter fight and do not talk.",
    ),
    Pair(
        "The children are laughing and playing in the snow.",
        "The children are hungry and freezing in the snow.",
    ),
    Pair("Our little shop had its best year ever.", "Our little shop had to close for ever."),
    Pair("The surgeon saved his sight.", "The surgeon could not save his sight."),
    Pair(
        "I danced at my sister's wedding all night.",
        "I wept at my sister's funeral all night.",
    ),
    Pair(
        "The lost hikers were found safe and well.",
        "The lost hikers were found dead in the valley.",
    ),
    Pair(
        "My students surprised me with a song.",
        "My students walked out and called me useless.",
    ),
    Pair(
        "We moved into the house that we always wanted.",
        "We were thrown out of the house that we always loved.",
    ),
)

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
