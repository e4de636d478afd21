"""DiffusionGemma under `AutoModelForCausalLM`: transformers has it for other Auto classes only.

`import unmask` registers it, once its config is imported.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, DiffusionGemmaConfig


class TextDiffusionGemma:
    """Makes models of transformers' own class."""

    config_class = DiffusionGemmaConfig

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        return _published().from_pretrained(*arguments, **options)

    @classmethod
    def _from_config(cls, *arguments: Any, **options: Any) -> Any:
        return _published()._from_config(*arguments, **options)


def _published() -> Any:
    from transformers import DiffusionGemmaForBlockDiffusion  # its module imports that of the config

    return DiffusionGemmaForBlockDiffusion


TextDiffusionGemma.__name__ = "DiffusionGemmaForBlockDiffusion"  # by which pipelines know a model
AutoModelForCausalLM.register(DiffusionGemmaConfig, TextDiffusionGemma, exist_ok=True)
