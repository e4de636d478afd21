"""Generation: the batched sampler, and the naive one that it is tested against
(`unmask.generation.naive`)."""

from unmask.generation import naive

__all__ = ["naive"]
