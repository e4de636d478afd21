"""The bodies of requests. What is unknown is refused by name, and what OpenAI has and Unmask has not, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from unmask.config.base import Config
from unmask.config.constraint import ConstraintConfig
from unmask.config.revise import ReviseConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.remote.protocol import OPENAI_NAMES, SERVER_SETTINGS

LARGEST = 2**63 - 1
PositiveCount = Annotated[int, Field(ge=1, le=2**31)]
NonEmptyText = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256, pattern="^[^\ufffd]*$")]
"""U+FFFD is what half a character decodes to, which the next token completes."""
Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported: a body may have as many wrong ones as it has bytes,
and reporting all takes seconds."""
MOST_MESSAGES, MOST_CALLS, MOST_BIASES = 4096, 128, 1024
TokenId = Annotated[int, Field(ge=0, le=2**31)]
Key = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
NOTHING: tuple[Any, ...] = ()
NO_PENALTY = (0, 0.0)
NO_PENALTIES = dict.fromkeys(("frequency_penalty", "presence_penalty"), NO_PENALTY)
NO_SUFFIX = "<|endoftext|>"
"""What editors made for Inception's API send as the suffix at the end of a file."""
PENALTIES = "Send 0, or leave it out; diffusion.repetition_penalty is another penalty."


def given_fields(values: Any, model: type[pydantic.BaseModel]) -> Any:
    """Fields that are not null, which is what is not given, as OpenAI has it. The first unknown one is
    refused."""
    if not isinstance(values, dict):
        return values
    names = {field.alias or name for name, field in model.model_fields.items()}
    given = {name: value for name, value in values.items() if value is not None}
    if unknown := next((name for name in given if name not in names), None):
        shown = unknown.encode(errors="backslashreplace").decode()  # without halves of characters
        raise PydanticCustomError("unknown", "is not a known field", {"param": shown})
    return given


class Body(pydantic.BaseModel):
    """A part of a body."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        return given_fields(values, cls)


def _nested(config: type[Config]) -> Any:
    """The type of a field with a config."""
    return Annotated[config, BeforeValidator(lambda values: given_fields(values, config))] | None


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise PydanticCustomError("too_many", "has more than {most} tokens", {"most": MOST_BIASES})
    return biases


NESTED = {"constraint": _nested(ConstraintConfig), "revise": _nested(ReviseConfig)}
_sampler_fields: dict[str, Any] = {
    name: (NESTED.get(name, field.annotation), field)
    for name, field in SamplerConfig.model_fields.items()
    if name not in {*OPENAI_NAMES, *SERVER_SETTINGS}
}
_SamplerSettings: Any = pydantic.create_model("SamplerSettings", __base__=Body, **_sampler_fields)


class DiffusionSettings(_SamplerSettings):
    """What OpenAI's fields do not cover: the settings of `unmask.SamplerConfig`, and the following."""

    stream: Literal["text", "frames"] = "text"
    """With `stream`: the committed text only, or also what every denoising step reveals and hides."""
    keys: Many[Key] | None = None
    """Keys of the random numbers, one per answer (those of one prompt side by side), as of
    `unmask.generate`."""
    version: str | None = None
    """The name of the weights that shall answer; others are refused with status 409."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher ones of a client go first."""
    timeout: float | None = Field(default=None, gt=0, le=86400)
    """Seconds after which the request is given up, waiting included."""
    length: Literal["search", "exact"] = "search"
    """With a `suffix`: the length of the gap is searched, up to `max_tokens` and 512, or it is exactly
    `max_tokens`."""

    @model_validator(mode="before")
    @classmethod
    def _of_clients(cls, values: Any) -> Any:
        given = values if isinstance(values, dict) else {}
        if (
            name := next((name for name in SERVER_SETTINGS if given.get(name) is not None), None)
        ) is not None:
            raise PydanticCustomError(
                "unsupported", "is not supported", {"param": name, "why": ": it is a setting of the server"}
            )
        return values

    @property
    def sampler(self) -> dict[str, Any]:
        """The settings of `SamplerConfig` that are given."""
        return {name: getattr(self, name) for name in _sampler_fields if name in self.model_fields_set}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """Whether a last chunk without choices has the usage."""
    include_obfuscation: Literal[False] = False


class SamplingRequest(Body):
    """What all requests for text have."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields of OpenAI's that are refused, unless they have one of these values, which change nothing."""

    model: str
    """A name that `/v1/models` lists."""
    max_tokens: PositiveCount | None = None
    """The length of the answer, in tokens; shorter where it ends with an end token. Default: that of
    `SamplerConfig.max_new_tokens`."""
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    """Divides the logits. Default 0: always the most probable token. With uniform noise it multiplies
    `t_min` and `t_max`, the temperatures of all steps: 1 is the default, and with 0 every step draws the most
    probable tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw among the most probable tokens that together reach this probability."""
    seed: Key | None = None
    """Seed of the random numbers. Default: drawn at random; the answer's `diffusion.seed` says which."""
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few)] | None = None
    """By token id: -100 forbids a token, and 100 allows only such tokens."""
    stop: Stop | Annotated[Many[Stop], Field(max_length=16)] | None = None
    """Strings before which the text is cut, wherever their tokens begin."""
    n: PositiveCount = 1
    """Answers for each prompt."""
    stream: bool = False
    """Whether the answer comes in chunks (server-sent events)."""
    stream_options: StreamOptions | None = None
    """Options of the chunks."""
    user: str | None = None
    """Is not read."""
    diffusion: DiffusionSettings = Field(default_factory=DiffusionSettings)
    """Settings of the denoising."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, values: Any) -> Any:
        """The other fields."""
        if not isinstance(values, dict):
            return values
        for name in cls.unsupported.keys() & values.keys():
            value, neutral = values[name], cls.unsupported[name]
            if value is not None and not any(value == each and type(value) is type(each) for each in neutral):
                why = f", except {' or '.join(map(repr, neutral))}" if neutral else ""
                remedy = PENALTIES if neutral is NO_PENALTY else "Leave it out."
                raise PydanticCustomError(
                    "unsupported", "is not supported", {"param": name, "why": f"{why}. {remedy}"}
                )
        return {name: value for name, value in values.items() if name not in cls.unsupported}

    @property
    def wanted_tokens(self) -> int | None:
        """The tokens of an answer that are asked for. Raises GenerationError for two numbers of them."""
        return self.max_tokens

    @property
    def wanted_seed(self) -> int | None:
        """The seed that is given. Raises GenerationError for two of them."""
        return self.seed

    @property
    def wants_log_probs(self) -> bool:
        """Whether answers have the log-probabilities of their tokens."""
        return False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def watched(self) -> bool:
        """Whether every step is looked at: text or frames are sent as they come, or the text may end an
        answer before its sequence ends."""
        return self.stream or bool(self.stops)

    @property
    def frames(self) -> bool:
        """Whether every frame is wanted."""
        return self.stream and self.diffusion.stream == "frames"


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function that the assistant called."""

    name: str
    arguments: str = ""
    """JSON. Default: none, as with an empty text."""


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message. Fields of an assistant's that are null in OpenAI's answers may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = Field(default=None, max_length=MOST_CALLS)
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Many[Any] | None = Field(default=None, max_length=0)
    audio: None = None
    function_call: None = None


class Function(Body):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments. Default: no arguments."""
    strict: bool | None = None
    """Calls that `tool_choice` demands always fit their schema."""


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Texts always fit the schema."""


class SchemaFormat(Body):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class NewerRequest(SamplingRequest):
    """What newer routes than /v1/completions have."""

    max_completion_tokens: PositiveCount | None = None
    """The newer name of `max_tokens`."""

    @property
    def wanted_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        if None not in (self.max_tokens, newer) and self.max_tokens != newer:
            raise GenerationError(
                "differs from max_tokens", where="max_completion_tokens", remedy="Leave one out"
            )
        return self.max_tokens if newer is None else newer


class ChatRequest(NewerRequest):
    """A body of /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_PENALTIES,
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
        **dict.fromkeys(("audio", "function_call", "functions", "metadata", "moderation"), NOTHING),
        **dict.fromkeys(("prediction", "prompt_cache_key", "prompt_cache_options"), NOTHING),
        **dict.fromkeys(("prompt_cache_retention", "reasoning_effort", "safety_identifier"), NOTHING),
        **dict.fromkeys(("verbosity", "web_search_options"), NOTHING),
    }

    messages: Many[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    """The conversation. Where the last message is the assistant's, it is continued."""
    logprobs: bool = False
    """Whether the answer has the log-probability of each token when it was revealed, at temperature 1."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """With `logprobs`: also those of this many most probable tokens at its position."""
    response_format: (
        Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    """What the text has to be; it always is."""
    tools: Many[Tool] | None = Field(default=None, max_length=128)
    """Functions that the model may call; its chat template shows them to it."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """none: the model sees no tools. auto: it may call some. required, or a function: the answer is one call,
    whose arguments fit the schema."""
    parallel_tool_calls: bool = True
    """If false, an answer ends with its first call."""

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs

    @property
    def watched(self) -> bool:
        return super().watched or (bool(self.tools) and not self.parallel_tool_calls)


def _kind_of_prompt(prompt: Any) -> str | None:
    """Which of a prompt's alternatives it is, by its first item."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    return {int: "tokens", list: "tokens of many"}.get(type(next(iter(prompt), None)), "texts")


PROMPT = "Input should be a valid text, a list of token ids, or a list of either"


class CompletionRequest(SamplingRequest):
    """A body of /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_PENALTIES,
        "best_of": (1,),
    }

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Many[str], Tag("texts")]
        | Annotated[Many[TokenId], Tag("tokens")]
        | Annotated[Many[Many[TokenId]], Tag("tokens of many")],
        Discriminator(_kind_of_prompt, custom_error_type="prompt", custom_error_message=PROMPT),
    ]
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """The length of the answer, in tokens; shorter where it ends with an end token. With `echo` it may be 0.
    Default: that of `SamplerConfig.max_new_tokens`."""
    suffix: str | None = None
    """The text after what is written: a gap is filled, by a bidirectional model or one that knows
    fill-in-the-middle prompts."""
    echo: bool = False
    """Whether the text begins with the prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """The answer has the log-probability of each token when it was revealed, at temperature 1, and those of
    this many most probable tokens. With `echo` it also has those of the prompt's tokens, from left to right;
    that of the first one is null."""

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None


class InfillRequest(SamplingRequest):
    """A body of /v1/infill: either `text`, or `segments` and `lengths`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(("max_tokens", "stop"), NOTHING)

    text: str | None = None
    """A text with a gap mark for each gap whose length is searched, and the mask token for each token that is
    missing."""
    segments: Many[str] | None = Field(default=None, min_length=2, max_length=257)
    """The texts between the gaps; the first and the last may be empty."""
    lengths: Many[PositiveCount | None] | None = None
    """The tokens of each gap; null: searched. Default: all are searched."""
    gap_mark: str = Field(default="<gap>", min_length=1, max_length=64)
    """What stands for a gap in `text`."""
    max_gap: PositiveCount = 64
    """The longest gap that is searched for, in tokens; times the gaps that are searched at most 512."""


class FimRequest(NewerRequest):
    """A body of /v1/fim/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_PENALTIES,
        "min_tokens": (0,),
        "metadata": NOTHING,
    }

    prompt: str
    """The text before the gap."""
    suffix: str = ""
    """The text after it. Empty: the prompt is continued."""
    random_seed: Key | None = None
    """Mistral's name of `seed`."""
    echo: ClassVar[bool] = False
    logprobs: ClassVar[None] = None

    @property
    def wanted_seed(self) -> int | None:
        if None not in (self.seed, self.random_seed) and self.seed != self.random_seed:
            raise GenerationError("differs from seed", where="random_seed", remedy="Leave one out")
        return self.random_seed if self.seed is None else self.seed


class EditMessage(Body):
    """A message of an edit."""

    role: Literal["system", "user"]
    content: str
    """The user's has text with `<|code_to_edit|>...<|/code_to_edit|>`, usually within
    `<|current_file_content|>` and beside `<|edit_diff_history|>`."""


class EditRequest(NewerRequest):
    """A body of /v1/edit/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_PENALTIES,
        **dict.fromkeys(("tools", "tool_choice", "response_format"), NOTHING),
    }

    messages: Many[EditMessage] = Field(min_length=1, max_length=2)
    """The user's, perhaps after one of the system, which then says what to do in place of the server's own
    instruction."""

    @field_validator("messages")
    @classmethod
    def _one_of_the_user(cls, messages: list[EditMessage]) -> list[EditMessage]:
        if [each.role for each in messages] not in (["user"], ["system", "user"]):
            raise PydanticCustomError(
                "messages", "Give one message of a user, after at most one of the system"
            )
        return messages

    @property
    def content(self) -> str:
        """The text with the region to edit."""
        return self.messages[-1].content

    @property
    def instruction(self) -> str | None:
        """What the client says is to be done."""
        return self.messages[0].content if len(self.messages) > 1 else None
