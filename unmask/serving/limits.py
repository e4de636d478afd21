"""What a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """The most that one request may ask for.

    Attributes:
        max_tokens: new tokens of a sequence.
        n: answers to one prompt.
        sequences: answers to all prompts.
        length: tokens of a prompt and its answer, where the model has no longest context.
        steps: denoising steps of a sequence.
        schema_bytes: of a JSON schema, a grammar or a regex, as text.
        compile_seconds, compile_bytes: that compiling the constraints of a request may take, of time and of
            memory.
        body_bytes: of the body of a request.
        body_seconds: that a client may take to send it.
        timeout: seconds that a request may take, waiting included.
    """

    max_tokens: int = 4096
    n: int = 16
    sequences: int = 256
    length: int = 32_768
    steps: int = 4096
    schema_bytes: int = 64 * 1024
    compile_seconds: float = 10.0
    compile_bytes: int = 2**30
    body_bytes: int = 1024 * 1024
    body_seconds: float = 30.0
    timeout: float = 600.0
