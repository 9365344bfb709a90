"""Vectorised operations on the slots of sequences.

Dimensions: S sequences, P slots of a sequence.
"""

import numpy as np

from tasks.base import Batch, Floats, Mask, Tokens


def first_occurrence(codes_SP: Tokens) -> Tokens:
    """Return, for each slot, the first slot of its sequence with the same code (itself, if no earlier slot has it).

    Args:
        codes_SP: codes, not negative; a code times twice the number of slots fits into 63 bits.
    """
    slots = np.arange(codes_SP.shape[1])
    bits = len(slots).bit_length()

    # Code and slot in one number: one plain sort is several times faster than a stable argsort.
    packed_SP = np.sort((codes_SP << bits) | slots, axis=1)
    order_SP = packed_SP & ((1 << bits) - 1)
    sorted_SP = packed_SP >> bits

    # Where the group of equal codes starts in the sorted order.
    start_SP = np.zeros_like(order_SP)
    start_SP[:, 1:] = np.where(sorted_SP[:, 1:] != sorted_SP[:, :-1], slots[1:], 0)
    start_SP = np.maximum.accumulate(start_SP, axis=1)

    # Back to the order of the slots.
    first_SP = np.empty_like(order_SP)
    np.put_along_axis(first_SP, order_SP, np.take_along_axis(order_SP, start_SP, axis=1), axis=1)
    return first_SP


def choose(rng: np.random.Generator, eligible_SP: Mask) -> Tokens:
    """Return, for each sequence, one of its eligible slots, drawn uniformly."""
    chosen_S: Tokens = np.where(eligible_SP, rng.random(eligible_SP.shape), -1.0).argmax(axis=1)
    return chosen_S


def shown_so_far(batch: Batch, answers: range) -> Floats:
    """Return how many different tokens of a range (S, T) stand in a sequence up to each position."""
    inputs_ST = batch.inputs_ST
    new_ST = first_occurrence(inputs_ST) == np.arange(inputs_ST.shape[1])
    return np.cumsum(new_ST & (inputs_ST >= answers.start) & (inputs_ST < answers.stop), axis=1, dtype=np.float64)
