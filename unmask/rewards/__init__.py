"""From a model's text to a verdict: strict, and in bounded time. No text is executed in this process."""
