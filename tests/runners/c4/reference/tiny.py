"""The smallest setting in which reference language models are trained."""

from typing import Any

TINY: dict[str, Any] = {
    "width": 16,
    "heads": 2,
    "layers": 2,
    "seq_len": 12,
    "batch_size": 4,
    "steps": 4,
    "validation_tokens": 48,
    "evaluations": 2,
    "checkpoint_every": 2,
    "device": "cpu",
}
