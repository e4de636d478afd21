"""What keeps a run from being lost: whole checkpoints, signals, and launchers whose processes train
together."""
