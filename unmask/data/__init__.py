"""Data on its way to a model: rows from files and hubs, rendered to token ids, packed and batched."""
