"""Generation: the slow reference (`unmask.generation.naive`) and the batched sampler, with keyed noise."""

from unmask.generation import naive

__all__ = ["naive"]
