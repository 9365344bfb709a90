"""Implementations that ``pretraining`` times: of a layer on whole sequences, and of a decoding step."""

from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.bench.implementations import Implementation
from runners.bench.pretraining.plain_transformer import PlainTransformer

LAYERS = {
    "rt-tiled-graph": Implementation(
        label="RT tiled, graph", layer=RecurrentTransformer, method="tiled", graph=True, form="single"
    ),
    "rt-tiled": Implementation(label="RT tiled", layer=RecurrentTransformer, method="tiled", form="single"),
    "rt-wavefront-graph": Implementation(
        label="RT wavefront, graph", layer=RecurrentTransformer, method="wavefront", graph=True, form="single"
    ),
    "rt-wavefront": Implementation(label="RT wavefront", layer=RecurrentTransformer, method="wavefront", form="single"),
    "transformer-compiled": Implementation(label="Transformer, compiled", layer=PlainTransformer, form="compiled"),
    "transformer": Implementation(label="Transformer", layer=Transformer, form="single"),
}
DECODERS = {
    "rt-step-graph": Implementation(label="RT, graph", layer=RecurrentTransformer, graph=True, form="step"),
    "rt-static-cache-graph": Implementation(
        label="RT static cache, graph", layer=RecurrentTransformer, graph=True, form="static-cache"
    ),
    "rt-step": Implementation(label="RT", layer=RecurrentTransformer, form="step"),
    "transformer-step-graph": Implementation(label="Transformer, graph", layer=Transformer, graph=True, form="step"),
    "transformer-static-cache-graph": Implementation(
        label="Transformer static cache, graph", layer=Transformer, graph=True, form="static-cache"
    ),
    "transformer-step": Implementation(label="Transformer", layer=Transformer, form="step"),
}
OURS = "rt-wavefront-graph"
"""The implementation that has targets."""


def layer_settings(implementation: Implementation) -> dict[str, str]:
    """Return the settings of the layer with which ``runners.c4`` builds a model of this implementation."""
    return {} if implementation.method is None else {"implementation": implementation.method}
