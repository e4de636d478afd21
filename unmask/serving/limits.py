"""What a request may ask for, and middlewares that refuse others. Pure ASGI: each sees a request before the application does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for.

    Attributes:
        max_tokens: new tokens of a sequence.
        n: answers to one prompt.
        steps: denoising steps of a sequence.
        schema_bytes: of a JSON schema, a grammar or a regex, as text.
        body_bytes: of the body of a request.
        timeout: seconds that a request may take, waiting included.
    """

    max_tokens: int = 4096
    n: int = 16
    steps: int = 4096
    schema_bytes: int = 64 * 1024
    body_bytes: int = 1024 * 1024
    timeout: float = 600.0
