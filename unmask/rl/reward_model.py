"""A sequence classifier as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from unmask.data.special_tokens import as_text, encode
from unmask.errors import ModelError
from unmask.models.alignment import align_weights
from unmask.models.chat_template import render_template
from unmask.models.model_files import (
    read_config,
    read_tokenizer,
    reading,
    refuse_missing,
    refuse_pickled,
)
from unmask.models.model_paths import fetched

BATCH = 32


class RewardModel:
    """A reward function: the logit that a sequence classifier gives to a prompt with its completion.

    Args:
        model: a sequence classifier with one output; or its folder, or its name on the Hugging Face hub, with
            safetensors weights.
        tokenizer: None: the model's own.
    """

    def __init__(self, model: PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase | None = None):
        model = str(model) if isinstance(model, Path) else model
        path = model if isinstance(model, str) else getattr(model, "name_or_path", "")
        if isinstance(model, str):
            folder = fetched(path)
            read_config(folder)
            tokenizer = tokenizer or read_tokenizer(folder)
            model = loaded_classifier(folder, path)
        elif tokenizer is None and not path:
            remedy = "Give it as reward_processing_classes"
            raise ModelError("has no tokenizer", where=type(model).__name__, remedy=remedy)
        self.model = model.eval()
        self.tokenizer = tokenizer or read_tokenizer(fetched(path, weights=False, model=False))
        if (outputs := self.model.config.num_labels) != 1:
            raise ModelError(
                f"the classifier has {outputs} labels",
                where=path or type(model).__name__,
                remedy="Give one with a single output.",
            )
        align_weights(self.model)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        sample = self.tokenizer("a")["input_ids"]
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        start = next(index for index in range(len(sample)) if sample[index : index + len(plain)] == plain)
        self._before, self._after = sample[:start], sample[start + len(plain) :]
        self.__name__ = "reward_model"

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The logit of each pair; pairs of text, or of messages, which the tokenizer's chat template renders.
        Special tokens that they spell are text."""
        rows = list(map(self.token_ids, prompts, completions))
        rewards: list[float] = []
        for start in range(0, len(rows), BATCH):
            batch = self.tokenizer.pad({"input_ids": rows[start : start + BATCH]}, return_tensors="pt")
            rewards += self.model(**batch.to(self.model.device)).logits[:, 0].tolist()
        return rewards

    def token_ids(self, prompt: Any, completion: Any) -> list[int]:
        """The ids with the tokenizer's own beginning and end, cut to its longest text."""
        text = prompt + completion if isinstance(prompt, str) else [*prompt, *completion]
        marked = as_text(self.tokenizer, text)
        if not isinstance(text, str):
            marked = render_template(self.tokenizer, marked)
        ids = encode(self.tokenizer, marked)
        room = max(0, self.tokenizer.model_max_length - len(self._before) - len(self._after))
        return [*self._before, *ids[:room], *self._after]


def loaded_classifier(folder: str, path: str) -> PreTrainedModel:
    """The sequence classifier in a folder, which errors call `path`."""
    refuse_pickled(folder)
    with reading("no sequence classifier", path, "Give its folder or its name on the hub."):
        # None: the library's choice. The config's could be a kernel on a hub.
        options: dict[str, Any] = {
            "trust_remote_code": False,
            "use_safetensors": True,
            "attn_implementation": None,
            "output_loading_info": True,
        }
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, **options)
        refuse_missing(info, path, "Give the folder or the name of a trained sequence classifier")
        return model
