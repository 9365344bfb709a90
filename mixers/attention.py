"""Multi-head softmax attention with ALiBi and QK-norm, and the Transformer layer made of it."""
