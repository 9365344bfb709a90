"""Multi-hop: the k-th successor of a node on a cycle whose edges stand in random order.

Source: Allen-Zhu 2025, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers"
(arXiv:2512.17351).
Dimensions: S sequences, T positions, N nodes, Q queries of a sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tasks.base import IGNORE, Accuracy, Batch, Floats, Ladder, Task, require


class MultiHop(Task):
    """The edges of a random cycle in random order, then queries: a number k and a node, whose k-th successor is output.

    Nodes are the tokens ``[0, N)``; the token ``N - 1 + k`` asks for k hops. An edge is a node and its successor; the
    cycle visits all nodes. Nodes of queries are uniform. In training k is uniform from 1 to ``hops``; validation and
    test ask for ``hops`` alone. Answers do not stand in the input. Only the nodes of queries have targets.

    An attention layer can follow one edge, so k hops need several layers, or a recurrence through its outputs.

    Example, first sequence of the test split of
    ``Config(nodes=5, hops=2, queries=3, train_examples=1, eval_examples=1)``; ``_`` is no target, ``^`` a scored
    position::

        inputs   3 4 1 0 4 2 2 1 0 3 6 0 6 4 6 1
        targets  _ _ _ _ _ _ _ _ _ _ _ 4 _ 1 _ 3
        scored   . . . . . . . . . . . ^ . ^ . ^

    Source: Allen-Zhu 2025 (arXiv:2512.17351), "Depo".

    Differs from the reference:
        Allen-Zhu 2025, arXiv:2512.17351, "Depo", appendix A.1. The generator (``depo_data``) was read in a public copy;
        not checked against the author's repository.

        - tokens: a node is one token; in theirs its name has 1 or 2 tokens (Depo1) or 5 to 7 (Depo2).
        - sequences: one cycle of 16 nodes; theirs has 3 to N, small ones more often (N 225 to 375 in Depo1, 75 to 125
          in Depo2), and several in 2,048 tokens. 16 queries, whose nodes may repeat; theirs has 10 or fewer of
          different nodes.
        - targets: the answer at its query, which it does not follow; in theirs it follows, after a token of its own.
        - training: 12,800 sequences, each read 200 times, with up to 4 hops; theirs draws new ones, with up to 8
          (Depo1) or 16 hops (Depo2), up to 4 for weaker models.
        - evaluation: the largest number of hops; theirs also half of it, on cycles of N nodes.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Task.Config):
        """Settings of multi-hop.

        Attributes:
            nodes: nodes of the cycle.
            hops: most hops that a query asks for, fewer than nodes.
            queries: queries in a sequence.
        """

        nodes: int = 16
        hops: int = 4
        queries: int = 16

        def __post_init__(self) -> None:
            super().__post_init__()
            require(1 <= self.hops < self.nodes, f"hops is {self.hops}: use at least 1, below nodes, {self.nodes}")
            require(self.queries >= 1, f"queries is {self.queries}: use at least 1")

        @property
        def train_length(self) -> int:
            return 2 * (self.nodes + self.queries)

    name = "multi-hop"
    sweeps: ClassVar[dict[str, tuple[Any, ...]]] = {"hops": (1, 2, 8), "nodes": (32, 64)}
    ladder = Ladder(
        # Among 16 nodes, no layer of six learned all of the first hop. The answer is never as near on the way back.
        axis="hops",
        rungs={hops: {"hops": hops, "nodes": 2 * hops + 2} for hops in (1, 2, 3, 4, 5, 6)},
    )
    config: Config

    @property
    def vocab_size(self) -> int:
        return self.config.nodes + self.config.hops

    @property
    def answer_count(self) -> int:
        return self.config.nodes

    def sample(self, rng: np.random.Generator, n: int, split: str) -> Batch:
        nodes, hops, queries = self.config.nodes, self.config.hops, self.config.queries

        # The cycle, and its edges in another order.
        cycle_SN = rng.permuted(np.tile(np.arange(nodes), (n, 1)), axis=1)
        edges_SN2 = np.stack([cycle_SN, np.roll(cycle_SN, -1, axis=1)], axis=2)
        order_SN = rng.permuted(np.tile(np.arange(nodes), (n, 1)), axis=1)
        edges_SN2 = np.take_along_axis(edges_SN2, order_SN[:, :, None], axis=1)

        # Queries: places on the cycle, and hops from them.
        places_SQ = rng.integers(nodes, size=(n, queries))
        hops_SQ = rng.integers(1 if split == "train" else hops, hops + 1, size=(n, queries))
        asked_SQ2 = np.stack([nodes - 1 + hops_SQ, np.take_along_axis(cycle_SN, places_SQ, axis=1)], axis=2)

        inputs_ST = np.concatenate([edges_SN2, asked_SQ2], axis=1).reshape(n, -1)
        targets_ST = np.full_like(inputs_ST, IGNORE)
        targets_ST[:, 2 * nodes + 1 :: 2] = np.take_along_axis(cycle_SN, (places_SQ + hops_SQ) % nodes, axis=1)
        return Batch(inputs_ST=inputs_ST, targets_ST=targets_ST, scored_ST=targets_ST != IGNORE)

    def candidates(self, batch: Batch) -> Floats:
        """A query's own node is never the answer."""
        return np.full(batch.scored_ST.shape, self.config.nodes - 1.0)

    def ceiling(self, split: str) -> Accuracy:
        """Return 1: all edges stand in the input before the queries."""
        return Accuracy(sequence=1.0, token=1.0)
