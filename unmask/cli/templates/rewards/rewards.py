"""What is rewarded. config.yaml names a function of this file as rewards.py:on_topic.

`prompts` and `completions` are lists of the same length. As the prompts of prompts.jsonl are messages, so is
each completion. Every other column of prompts.jsonl is a list too, by its name: here `word`. Return a number
for each completion, or None where there is none to give.

Training compares the completions of one prompt. A reward that is the same for all of them teaches nothing, so
give partial credit.
"""

LETTERS = 50  # of a good answer


def on_topic(prompts, completions, word, **columns):
    """1 for the word of the prompt, and up to 1 for a length near `LETTERS`."""
    texts = [messages[-1]["content"] for messages in completions]
    return [(one in text.lower()) + nearness(text) for text, one in zip(texts, word, strict=True)]


def nearness(text):
    letters = sum(character.isalpha() for character in text)
    return max(0.0, 1 - abs(letters - LETTERS) / LETTERS)
