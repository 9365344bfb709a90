"""Small command lines, and results folders that they have made."""

ANY_DIAGNOSTICS: dict[str, list[str]] = {
    "--mixer": ["transformer"],
    "--task": ["in-context-recall"],
    "--lr": ["1e-3", "5e-3"],
    "--weight-decay": ["0"],
    "--batch-size": ["16"],
    "--width": ["16"],
    "--mlp-width": ["16"],
    "--steps": ["4"],
    "--evaluations": ["2"],
    "--device": ["cpu"],
    "--reference": ["none"],
    "--task.train-examples": ["32"],
    "--task.eval-examples": ["20"],
    "--out": ["out"],
}
"""Options that every layer and task has."""
DIAGNOSTICS = ANY_DIAGNOSTICS | {"--mixer.heads": ["2"], "--task.length": ["16"]}
PRETRAINING: dict[str, list[str]] = {
    "--preset": ["tiny"],
    "--mixer": ["transformer"],
    "--width": ["16"],
    "--mlp-width": ["32"],
    "--heads": ["2"],
    "--layers": ["2"],
    "--seq-len": ["12"],
    "--batch-size": ["4"],
    "--steps": ["8"],
    "--validation-tokens": ["48"],
    "--evaluations": ["3"],
    "--checkpoint-every": ["3"],
    "--data": ["texts"],
    "--tokenizer": ["texts/tokenizer/tokenizer.json"],
    "--device": ["cpu"],
    "--out": ["out"],
}

LONGER = "200"
"""Steps of a study that is stopped on its way."""


def words(options: dict[str, list[str]], **changes: str | None) -> list[str]:
    """Return the words of options, some of which are changed; None leaves one out."""
    changed = options | {f"--{name.replace('_', '-')}": None if v is None else v.split() for name, v in changes.items()}
    return [word for name, given in changed.items() if given is not None for word in (name, *given)]
