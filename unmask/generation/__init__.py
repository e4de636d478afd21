"""Generation: the slow truth (`unmask.generation.reference`) and the batched sampler, with keyed noise."""

from unmask.generation import reference

__all__ = ["reference"]
