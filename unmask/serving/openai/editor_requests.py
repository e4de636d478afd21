"""The bodies of requests that plugins of editors send: as of Mistral's API, and of Inception's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from unmask.serving.openai.requests import NO_PENALTY, NOTHING, Body, Key, Many, NewerRequest

NO_SUFFIX = "<|endoftext|>"
"""What editors made for Inception's API send as the suffix at the end of a file."""


class FimRequest(NewerRequest):
    """A body of /v1/fim/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), NO_PENALTY),
        "min_tokens": (0,),
        "metadata": NOTHING,
    }

    prompt: str
    """The text before the gap."""
    suffix: str = ""
    """The text after it. Empty: the prompt is continued."""
    random_seed: Key | None = None
    """Mistral's name of `seed`."""


class EditMessage(Body):
    """A message of an edit."""

    role: Literal["system", "user"]
    content: str
    """Of the user: text with `<|code_to_edit|>...<|/code_to_edit|>`, usually within
    `<|current_file_content|>` and beside `<|edit_diff_history|>`."""


class EditRequest(NewerRequest):
    """A body of /v1/edit/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), NO_PENALTY),
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
