"""What is shown and recorded of secrets and of control characters: neither."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "********"
TOKENS = (
    "access|api|app|auth|bearer|bot|client|csrf|deploy|github|gitlab|hf|hub|id|jwt|oauth2?|openai|personal"
    "|refresh|sas|security|service"
    "|session|slack|vault|wandb|xsrf"
)
"""Before `token` or `tokens`, these make the name of a secret: `eos_token` and `max_new_tokens` are none."""
KEYS = (
    "access|account|admin|anthropic|api|app|auth|aws|azure|client|consumer|deploy|encryption|hf|hmac"
    "|license|master|openai|private|service|shared"
    "|signing|ssh|storage|subscription|wandb"
)
NAMES = (
    rf"(?:(?:{TOKENS})[_-]?tokens?|(?:{KEYS})[_-]?keys?(?:[_-]?id)?|secrets?(?:[_-]?keys?)?|passwords?"
    rf"|passwd|pwd|passcodes?|passphrases?"
    r"|bearer|authorization|cookies?|credentials?|creds|connection[_-]?strings?|conn[_-]?str)"
)
# where a word of a name begins, also in `slackWebhook`
WORD = r"(?:(?<![A-Za-z0-9])|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
# with more letters they are others: `author`, `spin`
WORDS = r"auth|dsns?|webhooks?(?:[_-]?urls?)?|t?otps?|pin|jwts?"
SECRET = rf"(?:{WORD}(?:{NAMES}|{WORDS})|api[_-]?keys?|passwords?|secrets?)(?:[_-]?\d+)?"
SECRET_KEY = re.compile(rf"{SECRET}$|(?:^|\.)token$", re.IGNORECASE)
ASSIGNED = re.compile(  # within a value in YAML
    rf"((?:{SECRET}|(?<!\w)token)['\"]?\s*[:=]\s*)(?:\{{[^}}]*}}?|\[[^\]]*]?|'[^']*'?|\"[^\"]*\"?|[^\s,}}]+)",
    re.IGNORECASE,
)
BEFORE_AT = re.compile(r"(?<![^\s?#])[^\s?#]*@")  # where passwords of URLs are
# of a URL, which pathlib may have folded to http:/
PASSWORD = re.compile(r"(?<=:/)(/?[^\s/@:?#]*):(?:[^\s/?#]+|(?!\d+/)[^\s?#@]+)@")
USER = re.compile(r"(\bhttps?:/{1,2})[^\s/@:?#]+@", re.IGNORECASE)
# user:password@host:port
HOST_CREDENTIALS = re.compile(
    r"(?<![^\s/@])(?=[^\s/@]++@[\w.-]++:\d)([^\s/@]*?(?<![\w/:.+-])[\w.+-]++):[^\s/@]++@"
)
PARAMETER = re.compile(  # of a URL, or in a connection string
    r"((?:[?&#;](?:[\w.-]*(?:token|key|secret|password|pwd|signature|sig|auth|credential)"
    r"|(?:[\w.-]*[_.-])?(?:t?otp|pin|jwt))"
    r"|\b(?:password|pwd|passwd|AccountKey|SharedAccessKey))=)[^&\s#'\"]+",
    re.IGNORECASE,
)
TOKEN = re.compile(
    r"\b(?:(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|nvapi-|pypi-AgE|npm_|ya29\.|(?i:bearer) "
    r")[\w.-]{16,}|(AIza)[\w-]{30,}"
    r"|(hooks\.slack\.com/services/|(?i:authorization: basic) )[\w/+=]{8,}"
    r"|(discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/webhookb2/)[^\s'\"]+"
    r"|(api\.telegram\.org/bot)[\w:-]+"
    r"|(gsk_|r8_)[A-Za-z0-9]{30,}|(A[KS]IA)[A-Z0-9]{16}\b)"
)
# of which a part may be masked
JWT = re.compile(r"(?<![\w*-])(?=[\w*-]++\.[\w*-]{8})([\w*-]*?\beyJ)[\w*-]{8,}+\.[\w*-]++(?:\.[\w*-]*+)?")
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def masked_text(text: str) -> str:
    """The text without the passwords of its URLs and without the tokens of known services.

    It may be a client's, and long: no pattern looks at a character from more than a few places, so the time
    is linear in the length."""
    text = BEFORE_AT.sub(lambda found: PASSWORD.sub(rf"\1:{MASK}@", found[0]), text)
    for pattern, shown_instead in (
        (USER, rf"\1{MASK}@"),
        (HOST_CREDENTIALS, rf"\1:{MASK}@"),
        (PARAMETER, rf"\1{MASK}"),
    ):
        text = pattern.sub(shown_instead, text)
    return JWT.sub(rf"\1{MASK}", TOKEN.sub(lambda found: f"{found[found.lastindex or 0]}{MASK}", text))


def is_secret(key: str, value: Any) -> bool:
    """Whether the value of a setting is a secret: the key says so, and it is more than a switch (`use_auth:
    true`)."""
    return bool(value) and value is not True and SECRET_KEY.search(key) is not None


def masked(value: Any, key: str = "") -> Any:
    """The value of a setting, which may hold others, without secrets: those in texts, and settings such as
    `api_key`, which mappings then lack: a run that reads them takes its own, or none."""
    if is_secret(key, value):
        return MASK
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {name: masked(item) for name, item in value.items() if not is_secret(str(name), item)}
    if isinstance(value, list | tuple):
        return type(value)(masked(item) for item in value) if type(value) in (list, tuple) else value
    return masked_text(value) if isinstance(value, str) else value


def masked_argument(argument: str) -> str:
    """An argument of the command line without secrets: `training.hub_token=...`, `--hub-token ...`, a URL."""
    key, separator, value = [*re.split("([= ])", argument, maxsplit=1), "", ""][:3]
    return (
        f"{key}{separator}{MASK}"
        if value and SECRET_KEY.search(key)
        else masked_text(ASSIGNED.sub(rf"\1{MASK}", argument))
    )


def masked_words(words: Iterable[str]) -> list[str]:
    """The words of a command line without secrets, such as the word after `--hub-token`."""
    shown_instead, of_secret = list[str](), False
    for word in words:
        shown_instead.append(MASK if of_secret and not word.startswith("--") else masked_argument(word))
        of_secret = word.startswith("--") and SECRET_KEY.search(word.removeprefix("--")) is not None
    return shown_instead


def find_mask(value: Any, key: str = "") -> str | None:
    """The dotted key of a text in which a secret is masked; None: there is none."""
    if isinstance(value, str):
        return key if MASK in value else None
    items: Any = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    )
    return next(
        (found for name, item in items if (found := find_mask(item, f"{key}.{name}".lstrip(".")))), None
    )


def shown(text: str) -> str:
    """A text for a terminal: without secrets, and with control characters (escape sequences, NUL, changes of
    direction) as `\\uXXXX`. Line ends and tabs stay."""
    return CONTROL.sub(
        lambda found: f"\\u{ord(found[0]):04x}" if ord(found[0]) < 0x10000 else f"\\U{ord(found[0]):08x}",
        masked_text(text),
    )


def shown_line(text: str) -> str:
    """The same on one line, as of a log: its line ends are escaped too."""
    return shown(text).replace("\n", "\\u000a")


def shell_line(words: Iterable[str]) -> str:
    """Words as a command line for bash, which also holds control characters without showing them: as bytes in
    `$'...'`."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if not CONTROL.search(word) and "\n" not in word:
        return shlex.quote(word)
    escaped = re.sub(r"[\\']", r"\\\g<0>", word)
    return (
        "$'"
        + re.sub(
            rf"{CONTROL.pattern}|\n",
            lambda found: "".join(f"\\x{byte:02x}" for byte in _bytes(found[0])),
            escaped,
        )
        + "'"
    )


def _bytes(character: str) -> bytes:
    """The bytes of a character as in a file's name, where half of one stands for a byte that is not UTF-8."""
    return character.encode(
        "utf-8", "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    )
