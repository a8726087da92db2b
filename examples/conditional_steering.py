"""Refuse questions about money, and only those: steering behind a gate.

Lee et al. 2024, "Programming refusal with conditional activation steering" (arXiv:2409.05907): a
condition is read early in the forward, and a behaviour is added later where it holds. The condition
here is a linear probe at layer 12, fitted by ridge regression; the behaviour is the direction of
refusing, as in `refusal_ablation.py`, added at layer 18. Both are at the last prompt token.

    python examples/conditional_steering.py [--model FOLDER]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from common import ask, last_rows, model_from, show, start
from prompts import REFUSAL, REFUSED, SERVED

from midstream import Gate, Probe, Steer

CONDITION_LAYER, STEERED_LAYER, SCALE = 12, 18, 2.2

MONEY = [
    "How do I invest in shares?",
    "What is a good interest rate on a loan?",
    "Explain what a mortgage is.",
    "How do banks set interest rates?",
    "Should I buy bonds or stocks?",
    "How can I save money for retirement?",
    "What is a credit score?",
    "How do I pay less tax?",
    "Describe how the stock market works.",
    "Why do currencies lose value?",
    "Give me tips for paying off my debt.",
    "What does an accountant do?",
    "Is it sensible to lend money to a friend?",
    "When are dividends paid?",
    "Compare pensions with savings accounts.",
    "Who decides the price of oil?",
]
OTHER = [
    "How do I bake bread?",
    "What is a good way to peel garlic?",
    "Explain what a glacier is.",
    "How do bees make honey?",
    "Should I visit Rome or Athens?",
    "How can I sleep better?",
    "What is a sonnet?",
    "How do I train a puppy?",
    "Describe how the heart works.",
    "Why do leaves change colour?",
    "Give me tips for painting my kitchen.",
    "What does a botanist do?",
    "Is it sensible to drink coffee at night?",
    "When are tulips planted?",
    "Compare violins with guitars.",
    "Who discovered penicillin?",
]
# Questions that the probe is not fitted to.
NEW_MONEY = [
    "How do I open a savings account?",
    "What moves the price of shares?",
    "Explain how banks lend money.",
    "Is it wise to invest in stocks?",
    "Tell me about credit cards.",
    "Why do people buy gold?",
]
NEW_OTHER = [
    "How do I plant tomatoes?",
    "What moves the tides?",
    "Explain how volcanoes form.",
    "Is it wise to run every day?",
    "Tell me about lighthouses.",
    "Why do people keep cats?",
]


def fit(yes: torch.Tensor, no: torch.Tensor, ridge: float = 0.3) -> tuple[torch.Tensor, float]:
    """Fit a direction and a bias with ⟨h, direction⟩ + bias near +1 for `yes` and −1 for `no`.

    Ridge regression in its dual form: there are far fewer rows than dimensions.

    Args:
        yes, no: float32 [rows, width].
        ridge: the penalty, in units of the rows' mean square length.
    """
    rows = torch.cat([yes, no])
    wanted = torch.cat([torch.ones(len(yes)), -torch.ones(len(no))])
    mean = rows.mean(0)
    centred = rows - mean
    products = centred @ centred.T
    penalty = ridge * products.diagonal().mean() * torch.eye(len(rows))
    direction = centred.T @ torch.linalg.solve(products + penalty, wanted)
    return direction, -float(direction @ mean)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Run the example.

    Returns:
        For `money` and for `other`, on questions that the probe is not fitted to: `…_scores`; and,
        as 0 or 1 for each, whether the gate changed the answer (`…_changed`), whether the answer
        refuses (`…_refused`), and whether it refuses without the gate (`…_refused_before`).
    """
    llm = start(model_from(arguments, __doc__))

    direction, bias = fit(
        last_rows(llm, MONEY, CONDITION_LAYER)[CONDITION_LAYER],
        last_rows(llm, OTHER, CONDITION_LAYER)[CONDITION_LAYER],
    )
    refuse = last_rows(llm, REFUSED, STEERED_LAYER)[STEERED_LAYER].mean(0) - last_rows(
        llm, SERVED, STEERED_LAYER
    )[STEERED_LAYER].mean(0)
    steer = Steer(refuse, layer=STEERED_LAYER, scale=SCALE, positions="last_prompt")
    gate = Gate(steer, Probe(direction, layer=CONDITION_LAYER, bias=bias), threshold=0.0)
    score = Probe(
        direction, layer=CONDITION_LAYER, bias=bias, name="money", positions="last_prompt"
    )

    questions = NEW_MONEY + NEW_OTHER  # one batch, with the same edit for all
    plain = ask(llm, questions, 18)
    gated = ask(llm, questions, 18, edits=gate, probes=score)

    found: dict[str, list[float]] = {}
    rows = []
    for nth, (question, before, after) in enumerate(zip(questions, plain, gated, strict=True)):
        topic = "money" if nth < len(NEW_MONEY) else "other"
        value = float(after.probes["money"][0])
        old, new = before.outputs[0], after.outputs[0]
        same = list(old.token_ids) == list(new.token_ids)
        rows.append((question, value, "as before" if same else new.text))
        for name, number in (
            ("scores", value),
            ("changed", not same),
            ("refused", REFUSAL in new.text),
            ("refused_before", REFUSAL in old.text),
        ):
            found.setdefault(f"{topic}_{name}", []).append(float(number))
    show("Steered where the score is above 0", ["question", "score", "answer"], rows)
    return found


if __name__ == "__main__":
    main()
