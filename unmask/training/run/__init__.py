"""The folder of a run: its lock, log, checkpoints and record, how it is resumed, and what surrounds a
training."""
