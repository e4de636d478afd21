"""The objects of whole answers, for the schema of the API. `choices.py` and `answers.py` make them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

Finish = Literal["stop", "length", "tool_calls"]


class Cost(TypedDict):
    """What an answer took; passes are null where a stop string ended it early."""

    denoising_steps: int
    forward_passes: int | None


class UsageObject(TypedDict):
    """Tokens of all choices. A prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    diffusion: Cost


class Keys(TypedDict):
    """With what `unmask.generate` gives the same answers."""

    seed: int
    keys: list[int]
    version: str | None


class ChoiceFacts(TypedDict):
    """The numbers of a choice; the others only with `diffusion.trace`."""

    denoising_steps: int
    forward_passes: int | None
    tokens_per_pass: float | None
    prompt: NotRequired[list[int]]
    tokens: NotRequired[list[int]]
    log_probs: NotRequired[list[float]]
    trace: NotRequired[dict[str, Any] | None]


class AnswerObject(TypedDict):
    """What all answers have."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: UsageObject
    diffusion: Keys


class CalledFunctionObject(TypedDict):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallObject(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunctionObject


class AnswerMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallObject]]


class Logprob(TypedDict):
    """A token, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]  # of a special token none


class TokenLogprob(Logprob):
    """A token when it was revealed, and the most probable ones at its position."""

    top_logprobs: list[Logprob]


class ChatLogprobs(TypedDict):
    """The log-probabilities of all tokens."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The log-probabilities of all tokens; null for the first token of a prompt, which nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(TypedDict):
    """What all choices have."""

    index: int
    finish_reason: Finish
    diffusion: ChoiceFacts


class ChatChoice(Choice):
    """An answer to messages."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class TextChoice(Choice):
    """A text."""

    text: str
    logprobs: TextLogprobs | None


class FimChoice(TextChoice):
    """What stands in a gap, also as a message."""

    message: AnswerMessage


class FilledGap(TypedDict):
    """A gap: its place and length in tokens, and its text."""

    start: int
    length: int
    text: str


class InfillChoice(TextChoice):
    """A whole text, and its gaps."""

    gaps: list[FilledGap]


class ChatCompletion(AnswerObject):
    """An answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class EditCompletion(AnswerObject):
    """An answer of /v1/edit/completions."""

    object: Literal["edit.completion"]
    choices: list[ChatChoice]


class TextCompletion(AnswerObject):
    """An answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class FimCompletion(AnswerObject):
    """An answer of /v1/fim/completions."""

    object: Literal["text_completion"]
    choices: list[FimChoice]


class Infill(AnswerObject):
    """An answer of /v1/infill."""

    object: Literal["infill"]
    choices: list[InfillChoice]
