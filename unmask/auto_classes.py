"""Diffusion models as models of transformers: what `AutoModelForCausalLM.from_pretrained` makes of the folder
of one, once `unmask` is imported.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, compiler
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from unmask.errors import ConfigError, ModelError, UnmaskWarning
from unmask.models.auto_config import UnmaskConfig

if TYPE_CHECKING:
    from unmask.models.diffusion_lm import DiffusionLM

WHERE = {"revision", "subfolder", "token", "cache_dir", "local_files_only"}
"""Arguments that say where a config is."""
NO_FIELDS = {"dtype", "use_cache", "transformers_version", "_name_or_path"}
"""What a config has besides the fields that the weights belong to."""
IGNORED = -100  # a label
OTHER_HEADS = (
    AutoModelForImageTextToText,
    AutoModelForMultipleChoice,
    AutoModelForNextSentencePrediction,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


class UnmaskForMaskedDiffusion:
    """A diffusion model as a model of transformers. The Auto classes make a subclass of it and of the stock
    model's class.

    Attributes:
        diffusion_lm: the model, read as Unmask reads it.
    """

    config_class = UnmaskConfig
    config: Any
    diffusion_lm: Any

    def __reduce__(self) -> tuple[Any, ...]:  # its class is made when it is needed
        return _empty, (type(self).__bases__[1],), vars(self)

    @classmethod
    def from_pretrained(cls, path: str | Path, *_: Any, config: Any = None, **options: Any) -> Any:
        """The model of a folder or hub id, with adapters merged. `options` as for `unmask.load`; raises its
        errors, and ConfigError for a config that differs from the folder's."""
        from unmask.models.adapters import has_adapters, merged
        from unmask.models.load import load

        if config is not None:
            _refuse_changes(config, path, options)
            if not options.keys() & {"dtype", "torch_dtype"}:
                options["dtype"] = config.dtype or "auto"
            options = {"attn_implementation": config._attn_implementation} | options
        informed = options.pop("output_loading_info", False)
        # the Auto classes replace a folder of adapters by its base
        given = options.pop("adapter_kwargs", None) or {}
        if adapters := given.get("_adapter_model_path"):
            path, options["revision"] = adapters, given.get("revision")
        lm = load(path, **options)
        model = as_transformers(merged(lm) if has_adapters(lm) else lm)
        return (model, {"missing_keys": set(), "unexpected_keys": set()}) if informed else model

    @classmethod
    def _from_config(
        cls,
        config: UnmaskConfig,
        *,
        dtype: Any = None,
        torch_dtype: Any = None,
        attn_implementation: str | None = None,
    ) -> Any:
        """The model of a config with new random weights, and the tokenizer of the folder or hub id that the
        config was read from."""
        from unmask.models.load import of_config

        lm = of_config(config, dtype or torch_dtype, attn_implementation)
        return as_transformers(lm).train()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        unmask_mask: Any = None,
        **rest: Any,
    ) -> Any:
        """Logits [B, T, V], of which row i predicts token i, where tokens are the mask token or not, and with
        labels [B, T] the mean cross-entropy where these are not -100, or its sum over `num_items_in_batch`.
        `logits_to_keep` and `return_dict` as in transformers. Warns if no token is the mask token, as where
        a likelihood is computed as a causal model's. Raises ModelError for other arguments, unless they ask
        for nothing."""
        if unmask_mask is not None:
            stock: Any = super()
            return stock.forward(input_ids=input_ids, unmask_mask=unmask_mask, **rest)
        if input_ids is None or (given := [name for name in rest if _asks(rest[name])]):
            raise ModelError(
                f"{given[0]} does not act" if input_ids is not None else "no input_ids",
                where=type(self).__name__,
                remedy="Give input_ids and attention_mask",
            )
        lm = self.diffusion_lm
        hidden_BT = input_ids == lm.mask_token_id
        if not (compiler.is_compiling() or hidden_BT.is_meta or hidden_BT.any()):
            what = "no token is the mask token: neither logits nor loss say how likely the tokens are"
            remedy = "Use unmask.log_likelihood, lm_eval --model unmask, or Unmask's trainers"
            warnings.warn(f"{what}. {remedy}.", UnmaskWarning, stacklevel=2)
        logits_BTV = lm.logits(input_ids, attention_mask, hidden_BT=hidden_BT)
        loss = None
        if labels is not None:
            how = "mean" if num_items_in_batch is None else "sum"
            loss = F.cross_entropy(
                logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=how
            )
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = MaskedLMOutput(loss=loss, logits=logits_BTV[:, kept])
        named = self.config.return_dict if return_dict is None else return_dict
        return output if named else output.to_tuple()

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Prompts and their completions, as `unmask.generation.token_ids.generate_ids` makes them."""
        from unmask.generation.token_ids import generate_ids

        prompts = inputs if input_ids is None else input_ids
        return generate_ids(self.diffusion_lm, prompts, attention_mask, generation_config, **settings)

    def resize_token_embeddings(self, *arguments: Any, **named: Any) -> Any:
        """Resize the embeddings, as in transformers, which replaces the output head."""
        stock: Any = super()
        table = stock.resize_token_embeddings(*arguments, **named)
        self.diffusion_lm.select_rows_of(stock.get_output_embeddings())
        return table


def _asks(value: Any) -> bool:
    """Whether an argument asks for something: tokenizers give zeros as `token_type_ids`."""
    return bool(value.any()) if isinstance(value, Tensor) else value is not None and value is not False


def _refuse_changes(config: PreTrainedConfig, path: str | Path, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a field of a config, which has those among the arguments of the Auto classes, is
    not the folder's. `options`: other arguments."""
    own = UnmaskConfig.from_pretrained(path, **{name: options[name] for name in WHERE & options.keys()})
    theirs, ours = ({**each.to_dict(), "num_labels": each.num_labels} for each in (config, own))
    changed = sorted(
        name for name in (theirs.keys() | ours.keys()) - NO_FIELDS if theirs.get(name) != ours.get(name)
    )
    if changed:
        raise ConfigError(
            "differs from the model's config.json, to which the weights belong",
            where=", ".join(changed),
            remedy="Leave it out, or change it there",
        )


def as_transformers(lm: DiffusionLM) -> PreTrainedModel:
    """The model of a DiffusionLM, with the forward pass and the generation of a diffusion model."""
    model: Any = lm.model
    stock: Any = type(model)
    model.__class__ = _diffusion_class(stock)
    model.diffusion_lm = lm
    return model


@cache
def _diffusion_class(stock: type) -> type:
    """A subclass of both, with the registered name, by which pipelines know a model."""
    name = UnmaskForMaskedDiffusion.__name__
    return type(name, (UnmaskForMaskedDiffusion, stock), {"__module__": __name__})


def _empty(stock: type) -> Any:
    made: Any = _diffusion_class(stock)
    return made.__new__(made)


class UnmaskForOtherTasks:
    """Refuses a diffusion model in the Auto classes of heads that it does not have."""

    config_class = UnmaskConfig

    @classmethod
    def from_pretrained(cls, path: str | Path, *_: Any, **__: Any) -> Any:
        from transformers.pipelines import PipelineException  # of other errors, pipelines print the traceback

        raise PipelineException(cls.__name__, str(path), str(_refusal(path)))

    @classmethod
    def _from_config(cls, config: UnmaskConfig, **_: Any) -> Any:
        raise _refusal(config.name_or_path)


def _refusal(where: str | Path) -> ModelError:
    return ModelError(
        "a diffusion model only predicts tokens",
        where=str(where),
        remedy="Use AutoModelForCausalLM, or the pipelines text-generation and fill-mask",
    )


# which transformers has for other Auto classes only
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("diffusion_gemma", "DiffusionGemmaForBlockDiffusion")
for _auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM):
    _auto.register(UnmaskConfig, UnmaskForMaskedDiffusion)
for _auto in OTHER_HEADS:
    _auto.register(UnmaskConfig, UnmaskForOtherTasks)
