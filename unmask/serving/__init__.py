"""Serving: OpenAI's API over the engine of `unmask.generation` (`unmask serve`)."""
