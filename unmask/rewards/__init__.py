"""Verdicts on text that a model wrote, in bounded time. No text is executed in this process."""
