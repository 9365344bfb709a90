"""One solver per task in plain Python, written from the description of the task.

A solver reads one input sequence, the settings, and (memorization only) the training split. It returns, for each
position that it believes to be scored, the answers it cannot tell apart: one, if the task can be solved.
"""

from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

from tasks.base import Batch

Answers = dict[int, list[int]]
Solver = Callable[[Sequence[int], Any, Batch], Answers]


def solve_recall(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Remember what followed each key; noise, if there is any, are the last tokens of the vocabulary."""
    keys = (config.vocab_size - getattr(config, "noise_vocab_size", 0)) // 2
    memory: dict[int, int] = {}
    answers: Answers = {}
    for position, token in enumerate(inputs):
        if token < keys:
            if token in memory:
                answers[position] = [memory[token]]
            memory[token] = inputs[position + 1]
    return answers


def solve_fuzzy_recall(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Cut the sequence into runs of key tokens and of value tokens, and remember which run followed which."""
    key_tokens, pad = (config.vocab_size - 1) // 2, config.vocab_size - 1
    memory: dict[tuple[int, ...], list[int]] = {}
    answers: Answers = {}
    position = next(i for i, token in enumerate(inputs) if token != pad)
    while position < len(inputs):
        key, value = [], []
        while inputs[position] < key_tokens:
            key.append(inputs[position])
            position += 1
        # The value of a known key is written down before reading it.
        for offset, token in enumerate(memory.get(tuple(key), [])):
            answers[position - 1 + offset] = [token]
        while position < len(inputs) and key_tokens <= inputs[position] < pad:
            value.append(inputs[position])
            position += 1
        memory.setdefault(tuple(key), value)
    return answers


def solve_selective_copying(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Collect what is not blank until the copy token."""
    blank, copy = config.vocab_size - 2, config.vocab_size - 1
    start = inputs.index(copy)
    data = [token for token in inputs[:start] if token != blank]
    return {start + 1 + i: [token] for i, token in enumerate(data)}


def solve_compression(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Every position asks for its own token, but for the compression token at the end."""
    return {position: [token] for position, token in enumerate(inputs[:-1])}


SHOWN: dict[Any, dict[tuple[int, ...], int]] = {}
"""Values of keys that training splits of memorization show."""


def solve_memorization(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Look the key up in the training split; an unknown one may have any value that the split does not show.

    Pairs share values, so an unknown pair may have any.
    """
    keys, step = (config.vocab_size - 1) // 2, 3 if config.key_pairs else 2
    if config not in SHOWN:  # the training split is the same for all inputs
        rows = zip(train.inputs_ST.tolist(), train.targets_ST.tolist(), strict=True)
        SHOWN[config] = {
            tuple(row[i - step + 1 : i]): values[i] for row, values in rows for i in range(step - 1, len(row), step)
        }
    shown = SHOWN[config]
    unused = sorted(set(range(keys, 2 * keys)) - (set() if config.key_pairs else set(shown.values())))
    asked = {i: tuple(inputs[i - step + 1 : i]) for i in range(step - 1, len(inputs), step)}
    return {i: [shown[key]] if key in shown else unused for i, key in asked.items()}


def solve_copying(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Read the text; in each complete example find the string, the query and what follows it."""
    text = "".join("abcdefghijklmnopqrstuvwxyz$|.*"[token] for token in inputs)
    answers: Answers = {}
    begin = 0
    while text[begin : begin + 1] == "$" and "." in text[begin:]:
        end = text.index(".", begin)
        fields = text[begin + 1 : end].split("|")
        if config.variant == "copy":
            string, start = fields[0], 0
        elif config.variant == "prefix-ngram":
            query, string = fields[:2]
            start = find_once(string, query)
        else:
            string, query = fields[0], fields[1][: config.ngram]
            start = find_once(string, query)
        answer = string[start:]
        for offset, letter in enumerate(answer):
            answers[end - 1 - len(answer) + offset] = [ord(letter) - ord("a")]
        begin = end + 1
    return answers


def find_once(string: str, query: str) -> int:
    """Position behind the only occurrence of the query."""
    starts = [i for i in range(len(string)) if string.startswith(query, i)]
    assert len(starts) == 1, f"{query} occurs {len(starts)} times in {string}"
    return starts[0] + len(query)


def solve_mqar(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Values are the upper half of the tokens; a key that no value follows asks for the one that followed it before."""
    memory: dict[int, int] = {}
    answers: Answers = {}
    for position, token in enumerate(inputs):
        if 0 < token < config.vocab_size // 2:
            if token in memory:
                answers[position] = [memory[token]]
            else:
                memory[token] = [*inputs, 0][position + 1]
    return answers


def solve_parity(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Flip a switch at every one."""
    odd = False
    answers: Answers = {}
    for position, bit in enumerate(bit for bit in inputs if bit < 2):
        odd ^= bit == 1
        answers[position] = [int(odd)]
    return dict([answers.popitem()]) if config.last_only else answers


def solve_permutations(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Follow each object from place to place."""
    names = ["".join(images) for images in permutations("01234"[: config.degree])]
    places = names[0]
    answers: Answers = {}
    for position, token in enumerate(inputs):
        places = "".join(names[token][int(place)] for place in places)
        answers[position] = [names.index(places)]
    return answers


def solve_group_words(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Follow each object of each factor from place to place; a residue modulo n is a rotation of n objects.

    The token at the start is the one behind those of elements, and moves nothing.
    """
    elements = list(product(*(members(part[0], int(part[1:])) for part in config.group.split("x"))))
    places = elements[0]
    answers: Answers = {}
    for position, token in enumerate(inputs):
        images = elements[token % len(elements) if token < len(elements) * config.copies else 0]
        places = tuple(tuple(b[place] for place in a) for a, b in zip(places, images, strict=True))
        answers[position] = [elements.index(places)]
    return answers


def members(kind: str, n: int) -> list[tuple[int, ...]]:
    """Elements of a group as permutations in their order; an even one has as many cycles as objects, modulo 2."""
    if kind == "Z":
        return [tuple((i + shift) % n for i in range(n)) for shift in range(n)]
    found = []
    for images in permutations(range(n)):
        todo, cycles = set(range(n)), 0
        while todo:
            place, cycles = todo.pop(), cycles + 1
            while (place := images[place]) in todo:
                todo.remove(place)
        if kind == "S" or (n - cycles) % 2 == 0:
            found.append(images)
    return found


def solve_modular_arithmetic(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Let Python compute what stands before the equals sign."""
    digits = "".join(map(str, range(config.modulus)))
    text = "".join((digits + "+-*()= ")[token] for token in inputs)
    size = len(text) // config.expressions
    ends = [text.index("=", start) for start in range(0, len(text), size)]
    return {end: [eval(text[end // size * size : end]) % config.modulus] for end in ends}


def solve_forgetting_mqar(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """A key that a value follows is written; another one asks for what was written last."""
    memory: dict[int, int] = {}
    answers: Answers = {}
    for position, (token, following) in enumerate(zip(inputs, [*inputs[1:], 0], strict=True)):
        if 0 < token < config.vocab_size // 2:
            if following:
                memory[token] = following
            else:
                answers[position] = [memory[token]]
    return answers


def solve_joint_keys(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """A pair of keys that a value follows is written; another one asks for its value."""
    memory: dict[tuple[int, int], int] = {}
    answers: Answers = {}
    third = config.vocab_size // 3
    for position, (token, following) in enumerate(zip(inputs, [*inputs[1:], 0], strict=True)):
        if third <= token < 2 * third:
            pair = (inputs[position - 1], token)
            if following:
                memory[pair] = following
            else:
                answers[position] = [memory[pair]]
    return answers


def solve_flip_flop(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Obey the instructions."""
    bit, answers = -1, {}
    for position in range(0, len(inputs), 2):
        if inputs[position] == 2:
            bit = inputs[position + 1]
        elif inputs[position] == 3:
            answers[position] = [bit]
    return answers


def solve_multi_hop(inputs: Sequence[int], config: Any, train: Batch) -> Answers:
    """Walk from node to node."""
    edges = 2 * config.nodes
    following = dict(zip(inputs[:edges:2], inputs[1:edges:2], strict=True))
    answers: Answers = {}
    for position in range(edges + 1, len(inputs), 2):
        node = inputs[position]
        for _ in range(inputs[position - 1] - config.nodes + 1):
            node = following[node]
        answers[position] = [node]
    return answers


SOLVERS: dict[str, Solver] = {
    "in-context-recall": solve_recall,
    "noisy-in-context-recall": solve_recall,
    "fuzzy-in-context-recall": solve_fuzzy_recall,
    "selective-copying": solve_selective_copying,
    "compression": solve_compression,
    "memorization": solve_memorization,
    "copying": solve_copying,
    "mqar": solve_mqar,
    "parity": solve_parity,
    "s5-permutations": solve_permutations,
    "modular-arithmetic": solve_modular_arithmetic,
    "group-words": solve_group_words,
    "forgetting-mqar": solve_forgetting_mqar,
    "joint-keys": solve_joint_keys,
    "flip-flop": solve_flip_flop,
    "multi-hop": solve_multi_hop,
}
