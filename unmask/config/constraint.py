"""What generated text has to match."""

from __future__ import annotations

import json as json_text
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field
from pydantic_core import PydanticSerializationError

from unmask.config.base import Config, OnResume
from unmask.errors import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # `json` is also a method of pydantic's, deprecated

    class ConstraintConfig(Config):
        """What generated text has to match: exactly one of `choice`, `regex`, `json_schema`, `json` and
        `grammar`.

        Raises:
            ConfigError: none or several of them are set, or the schema is not JSON.
        """

        on_resume = OnResume.ACTS

        choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
        """One of these texts."""
        regex: str | None = None
        """A regular expression, which the whole text matches. The syntax is Rust's: like Python's, without
        look-around, backreferences and anchors."""
        json_schema: dict[str, Any] | str | None = None
        """JSON that fits this schema: a mapping, or its JSON text."""
        json: bool = False  # type: ignore[assignment]
        """Any JSON value."""
        grammar: str | None = None
        """A text of this context-free grammar, in Lark's syntax; it begins with the rule `start`."""
        depth: int = Field(default=2, ge=0)
        """json and grammar: how deep arrays and objects, or any rule, may be nested in themselves. Recursion
        at the beginning or at the end of rules, as of lists, is not bounded."""
        over: Literal["gap", "text"] = "gap"
        """What has to match in a text to fill. gap: each of its gaps, alone. text: the text as a whole, with
        all its gaps filled."""

        def without_effect(self) -> Iterator[ConfigError]:
            if self.grammar is None and not self.json:
                yield ConfigError(
                    "has no effect without json or a grammar", where="depth", remedy="Leave it out"
                )

        def check(self) -> None:
            texts = ("choice", "regex", "json_schema", "grammar")
            given = [name for name in texts if getattr(self, name) is not None] + ["json"] * self.json
            if len(given) != 1:
                what = (
                    f"{' and '.join(given)} contradict one another"
                    if given
                    else "says nothing that text could match"
                )
                raise ConfigError(
                    what,
                    where=given[1] if given else "",
                    remedy="Set one of choice, regex, json_schema, json and grammar",
                )
            halved = ConfigError(
                "holds half a character (a surrogate)", where=self.kind, remedy="Write it in UTF-8"
            )
            try:
                self.model_dump_json()
                json_text.dumps(self.schema_object(), ensure_ascii=False, allow_nan=False).encode()
            except PydanticSerializationError as error:
                if "surrogate" not in str(error):
                    raise ConfigError(
                        "is nested too deeply", where=self.kind, remedy="Write it flatter"
                    ) from None
                raise halved from None
            except UnicodeEncodeError:
                raise halved from None
            except RecursionError:
                raise ConfigError(
                    "is nested too deeply", where=self.kind, remedy="Write it flatter"
                ) from None
            except (TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                what = f"is not JSON: {error}"
                raise ConfigError(
                    what,
                    where=self.kind,
                    remedy="Leave out NaN, infinities and what is neither text nor number",
                ) from None

        @property
        def kind(self) -> str:
            """The name of the setting."""
            names = ("choice", "regex", "json_schema", "json", "grammar")
            return next(name for name in names if getattr(self, name) not in (None, False))

        def schema_object(self) -> Any:
            """The schema as an object. Raises ConfigError for text that is not JSON."""
            if not isinstance(self.json_schema, str):
                return self.json_schema
            try:
                return json_text.loads(self.json_schema)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"is not JSON: {error}", where="json_schema", remedy="Give a JSON object"
                ) from None
