"""A sequence classifier as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from unmask.errors import ModelError
from unmask.models.alignment import align_weights

BATCH = 32


class RewardModel:
    """A reward function: the logit that a sequence classifier gives to a prompt with its completion.

    Args:
        path: a folder, or the name of a model on the Hugging Face hub; it must have one output.
        device: as torch names it.
    """

    def __init__(self, path: str, *, device: str = "cpu"):
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.model = AutoModelForSequenceClassification.from_pretrained(path).to(device).eval()
        except (OSError, ValueError) as error:
            raise ModelError(f"no sequence classifier: {error}", where=path, remedy="Give its folder or its name on the hub.") from error
        outputs = self.model.config.num_labels
        if outputs != 1:
            raise ModelError(f"the classifier has {outputs} labels", where=path, remedy="Give one with a single output.")
        align_weights(self.model)
        self.__name__ = "reward_model"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The logit of each pair; pairs of text, or of messages, which the tokenizer's chat template renders."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards: list[float] = []
        for start in range(0, len(texts), BATCH):
            batch = self.tokenizer(texts[start : start + BATCH], padding=True, truncation=True, return_tensors="pt")
            rewards += self.model(**batch.to(self.model.device)).logits[:, 0].tolist()
        return rewards

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False))
