"""OpenAI's API: from a body to requests of the engine, and from its events to answers. `routes.py` has the
routes."""
