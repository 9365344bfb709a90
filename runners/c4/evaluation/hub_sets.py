"""The paper's six multiple-choice sets on the Hugging Face hub: their addresses, and how rows become questions.

The prompts are those of lm-evaluation-harness, with three exceptions: PIQA's prompt begins with "Goal:" instead of
"Question:", OpenBookQA's stem is framed like ARC's questions, and SciQ's prompt begins with the question if there is no
supporting text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Choices = tuple[list[str], list[str], int]
"""Contexts, choices without the space before them, and the index of the right choice."""


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Place of a set on the Hugging Face hub, and format of its rows.

    Attributes:
        path: name of the data set.
        config: its configuration, if it has several.
        choices: function that returns the contexts and choices of a row.
    """

    path: str
    config: str | None
    choices: Callable[[Row], Choices]


def _piqa(row: Row) -> Choices:
    context = f"Goal: {row['goal']}\nAnswer:"
    return [context] * 2, [row["sol1"], row["sol2"]], row["label"]


def _hellaswag(row: Row) -> Choices:
    context = _without_marks(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    endings = [_without_marks(ending) for ending in row["endings"]]
    return [context] * len(endings), endings, int(row["label"])


def _without_marks(text: str) -> str:
    """Remove the marks that WikiHow's pages left in HellaSwag, such as [header]."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: Row) -> Choices:
    choices = row["choices"]
    context = f"Question: {row['question']}\nAnswer:"
    return [context] * len(choices["text"]), choices["text"], choices["label"].index(row["answerKey"])


def _openbookqa(row: Row) -> Choices:
    return _arc({**row, "question": row["question_stem"], "answerKey": row["answerKey"].strip()})


def _sciq(row: Row) -> Choices:
    context = f"{row['support']}\nQuestion: {row['question']}\nAnswer:".lstrip()
    names = ("distractor1", "distractor2", "distractor3", "correct_answer")
    return [context] * len(names), [row[name] for name in names], len(names) - 1


def _winogrande(row: Row) -> Choices:
    """Fill the blank with each choice; the text after the blank is the continuation."""
    before, _, after = row["sentence"].partition("_")
    contexts = [before + row["option1"], before + row["option2"]]
    return contexts, [after.strip()] * 2, int(row["answer"]) - 1


HUB_SETS = {
    "piqa": HubSet(path="baber/piqa", config=None, choices=_piqa),
    "hellaswag": HubSet(path="Rowan/hellaswag", config=None, choices=_hellaswag),
    "arc_easy": HubSet(path="allenai/ai2_arc", config="ARC-Easy", choices=_arc),
    "openbookqa": HubSet(path="allenai/openbookqa", config="main", choices=_openbookqa),
    "sciq": HubSet(path="allenai/sciq", config=None, choices=_sciq),
    "winogrande": HubSet(path="allenai/winogrande", config="winogrande_xl", choices=_winogrande),
}
