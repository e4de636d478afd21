"""Edits: a region of a file is written again, as an editor's next-edit plugin asks for it.

The message has the tags that Inception's Mercury introduced: snippets that were viewed, the current file with
the region to edit and the cursor, and the history of edits. It goes to the model as it is, after what is
asked of it; the answer is the edited region in a code fence, as such plugins read it.
"""

from __future__ import annotations

import re

from unmask.errors import GenerationError

REGION, END, CURSOR = "<|code_to_edit|>", "<|/code_to_edit|>", "<|cursor|>"
INSTRUCTION = (
    f"Predict the next edit. Rewrite the code between {REGION} and {END}, given the code that was "
    "viewed, the current file and the edits so"
    " far. Answer with the rewritten code alone, in a code fence."
)
FENCE = re.compile(r"^\s*```[^\n`]*\n(.*?)(?:\n?```\s*)?$", re.S)


def edit_prompt(content: str, instruction: str | None = None) -> list[dict[str, str]]:
    """The messages to complete.

    Args:
        instruction: that of the client, in place of `INSTRUCTION`.

    Raises:
        GenerationError: there is not one region to edit.
    """
    starts, ends = content.count(REGION), content.count(END)
    if (starts, ends) != (1, 1) or content.index(REGION) > content.index(END):
        what = f"has {starts} {REGION} and {ends} {END}"
        where = f"messages.{0 if instruction is None else 1}.content"
        raise GenerationError(what, where=where, remedy=f"Mark one region: {REGION}...{END}")
    return [{"role": "system", "content": instruction or INSTRUCTION}, {"role": "user", "content": content}]


def region_to_edit(content: str) -> str:
    """The text between the tags, which stand on lines of their own or within a line."""
    return content.partition(REGION)[2].partition(END)[0].removeprefix("\n")


def edited_region(text: str, content: str) -> str:
    """The region of an answer in a code fence, without tags, whether the model wrote a fence and tags or not.
    It ends with the end of a line where that of the message does, since editors put it in the region's place.

    Args:
        content: the message with the region to edit.
    """
    if REGION in text:
        text = text.partition(REGION)[2].partition(END)[0].strip("\n")
    elif fenced := FENCE.match(text):
        text = fenced[1]
    region = text.replace(END, "").replace(CURSOR, "")
    if region and not region.endswith("\n") and region_to_edit(content).endswith("\n"):
        region += "\n"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", region)), default=0))
    return f"{fence}\n{region}\n{fence}"
