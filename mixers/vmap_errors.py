"""What to do about a layer that ``torch.func.vmap`` cannot compute for all runs at once, in place of PyTorch's message.

The parts of PyTorch's messages are those of version 2.13.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mixers.base import ContractError
from mixers.models import Backbone
from mixers.origin import where

NO_VMAP_RULE = (nn.RNNBase, nn.LSTMCell)
"""Modules that ``torch.func.vmap`` cannot run: nn.LSTM, nn.GRU, nn.RNN and nn.LSTMCell."""
SIGNS = ("vmap", "Batching rule", "data pointer of Tensor that doesn't have storage", "match the broadcast shape")
"""Parts of the messages of errors that hardly arise unless all runs are computed at once."""
MADE_FROM_INPUTS = "write only into tensors made from the inputs, such as x.new_zeros(...)"
KEEPS_TENSORS = "keep no tensor from call to call, and recompute nothing by torch.utils.checkpoint"
ADVICE = {
    "data-dependent control flow": "choose between values by torch.where, not by an if or a loop in Python",
    ".item()": "read no value of a tensor in Python, as .item(), float() and int() do",
    "data pointer": "read no value of a tensor in Python, as .tolist() and .numpy() do",
    "dynamic shape": "let no shape depend on values, as with .nonzero() or a mask as an index: use torch.where",
    "random operation": "draw no random numbers, as dropout does",
    "is not possible because there exists": MADE_FROM_INPUTS,
    "match the broadcast shape": MADE_FROM_INPUTS,
    "escaped from inside": KEEPS_TENSORS,
    "_NoopSaveInputs": KEEPS_TENSORS,  # torch.utils.checkpoint in PyTorch 2.11
    "setup_context": "give the autograd.Function a rule for vmap, as mixers/ops/runs.py does",
}
"""What to do instead, by a part of PyTorch's message."""


@contextmanager
def explaining_vmap(model: Backbone) -> Iterator[None]:
    """Turn an error of ``torch.func.vmap`` into one line that begins with what to do.

    Args:
        model: what is computed for all runs at once; the message names the class of its layers.

    Raises:
        ContractError: the layer cannot be computed for all runs at once. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if not any(sign in said for sign in SIGNS):
            raise
        layer = type(model.stack[0]).__name__
        sentence = re.split(r"\. |; | \(see |,? [Pp]lease ", said.removeprefix("vmap: "))[0].rstrip(".")
        raise ContractError(
            f"mixer {layer} cannot be computed for all runs at once: {where(error)}{_advice(said, model)}; "
            f'see "What a layer may do" in docs/own-layers.md (torch.func.vmap: {sentence})'
        ) from error


def _advice(said: str, model: nn.Module) -> str:
    """Return what to do, by PyTorch's message and by the model's modules."""
    refused = [
        f"nn.{type(module).__name__} ({name})"
        for name, module in model.named_modules()
        if isinstance(module, NO_VMAP_RULE)
    ]
    if "Batching rule" in said and refused:
        return f"vmap has no rule for {', '.join(refused)}: write out its gates, as mixers/ops/lstm.py does"
    return next((advice for part, advice in ADVICE.items() if part in said), "use other operations here")
