"""Edits: a region of a file is written again, as an editor's next-edit plugin asks for it.

The message has the tags that Inception's Mercury introduced: snippets that were viewed, the current file with the region to edit and the
cursor, and the history of edits. It goes to the model as it is, after what is asked of it; the answer is the edited region in a code fence,
as such plugins read it.
"""

from __future__ import annotations

import re

from unmask.errors import GenerationError

REGION, END, CURSOR = "<|code_to_edit|>", "<|/code_to_edit|>", "<|cursor|>"
INSTRUCTION = (
    f"Predict the next edit. Rewrite the code between {REGION} and {END}, given the code that was viewed, the current file and the edits so"
    " far. Answer with the rewritten code alone, in a code fence."
)
FENCE = re.compile(r"^\s*```[^\n`]*\n(.*?)(?:\n?```\s*)?$", re.S)


def edit_prompt(content: str) -> list[dict[str, str]]:
    """The messages to complete. Raises GenerationError unless there is one region to edit."""
    starts, ends = content.count(REGION), content.count(END)
    if (starts, ends) != (1, 1) or content.index(REGION) > content.index(END):
        what = f"has {starts} {REGION} and {ends} {END}"
        raise GenerationError(what, where="messages.0.content", remedy=f"Mark one region: {REGION}...{END}")
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": content}]


def edited_region(text: str) -> str:
    """The region of an answer in a code fence, without tags, whether the model wrote a fence and tags or not."""
    if REGION in text:
        text = text.partition(REGION)[2].partition(END)[0].strip("\n")
    elif fenced := FENCE.match(text):
        text = fenced[1]
    region = text.replace(END, "").replace(CURSOR, "")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", region)), default=0))
    return f"{fence}\n{region}\n{fence}"
