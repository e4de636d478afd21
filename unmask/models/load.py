"""Loading any causal language model of transformers, or a released diffusion model, as a DiffusionLM."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed as zero
from transformers.utils import cached_file

from unmask.config.run import AttentionName
from unmask.errors import ModelError
from unmask.models.agreement import first_position
from unmask.models.alignment import align_weights
from unmask.models.attention import ATTENTION_NAME
from unmask.models.chat_template import resolve_end_tokens
from unmask.models.device_map import resolve_device, split_layers
from unmask.models.diffusion_lm import SETTINGS_KEY, DiffusionLM
from unmask.models.family import Family
from unmask.models.hooks.quality_head import NAME as QUALITY_HEAD
from unmask.models.hooks.quality_head import add_quality_head
from unmask.models.hooks.time_embedding import NAME as TIME_EMBEDDING
from unmask.models.hooks.time_embedding import add_time_embedding
from unmask.models.model_files import (
    read_config,
    read_tokenizer,
    reading,
    refuse_missing,
    refuse_pickled,
    weight_files,
)
from unmask.models.model_paths import check_model, model_folder

MASK_TOKEN = "<|mask|>"
STOCK_SETTINGS: dict[str, Any] = {
    "attention": "causal",
    "block_size": None,
    "logit_shift": None,
    "causal_context": False,
    "time_embedding": False,
    "quality_head": False,
    "expand_token_id": None,
    "delete_token_id": None,
    "max_gap": None,
    "eos_token_ids": None,
    "padding_idx": None,
}
Quantization = Literal["4bit", "8bit"]
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load(
    path_or_id: str | pathlib.Path,
    attention: AttentionName | None = None,
    block_size: int | None = None,
    logit_shift: bool | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    device_map: Literal["balanced"] | None = None,
    eos_token_ids: Sequence[int] | None = None,
    parse_special_tokens: bool = False,
) -> DiffusionLM:
    """Load a causal language model, stock or saved by Unmask, or a released diffusion model (docs/models.md).

    Args:
        path_or_id: a local folder, of a model or of a training run, or a hub id.
        attention: the pattern; None: as saved or released, and causal for a stock model.
        block_size: the attention block of a block-causal model; None: as saved.
        logit_shift: whether row i predicts token i + 1; None: as saved, or True for causal and False
            otherwise.
        dtype: float32, bfloat16, float16 or float64.
        device: a torch device, or "auto": the GPU if there is one.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run modeling code of the model's repository.
        quantization: "4bit" (NF4, with quantized scales) or "8bit" weights of the linear layers, by
            bitsandbytes; embeddings and head stay in `dtype`. Such a model is trained with adapters only.
        device_map: "balanced" spreads the layers over all GPUs of this process, by their memory.
        eos_token_ids: the tokens that end a text, besides the tokenizer's EOS; None: as saved, and for other
            models those of generation_config.json, config.json and the chat template's end of turn.
        parse_special_tokens: read special tokens that texts spell, such as `</s>`, as tokens; otherwise they
            stay text.

    Returns:
        The model in eval mode. Its mask token is the tokenizer's, or a new one.

    Raises:
        ModelError: no model, tokenizer or safetensors weights there, or not all weights, an architecture
            without attention masks, a tokenizer with tokens that the embeddings lack, an end token outside
            the vocabulary, an unknown dtype, a missing device, or quantization without bitsandbytes.
        ConfigError: an unknown pattern, or a block size that does not fit it.
    """
    check_model(path_or_id)
    where = model_folder(path_or_id)
    hub_options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config, family = read_config(where, hub_options)
    tokenizer = read_tokenizer(where, hub_options, config, family, parse_special_tokens=parse_special_tokens)
    device, weight_dtype = resolve_device(device), _dtype(dtype)
    placement = _placement(config, weight_dtype, device, quantization, device_map)
    refuse_pickled(where, revision)
    model = _load_model(where, config, weight_dtype, hub_options | placement, family)
    model = model if placement else model.to(device)
    with reading(
        "cannot use the model", where, "Check config.json, generation_config.json and the tokenizer's files"
    ):
        align_weights(model)
        settings = pattern_settings(config, attention, block_size, logit_shift)
        if eos_token_ids is not None:
            settings["eos_token_ids"] = eos_token_ids
        if settings["time_embedding"]:
            _load_module(add_time_embedding(model), TIME_EMBEDDING, "time embedding", where, revision)
        if settings["quality_head"]:
            _load_module(add_quality_head(model), QUALITY_HEAD, "quality head", where, revision)
        return make_diffusion(model, tokenizer, **settings)


def _placement(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str,
    quantization: Quantization | None,
    device_map: str | None,
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for weights that are spread over devices or quantized while loading;
    empty for others."""
    if device_map is None:
        return (
            {"quantization_config": _quantization(quantization, dtype), "device_map": {"": device}}
            if quantization
            else {}
        )
    if quantization is not None:
        raise ModelError(
            "quantized weights are not spread over devices",
            where="device_map, quantization",
            remedy="Leave one of the two out",
        )
    memory = [
        torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count())
    ]
    return {"device_map": split_layers(config, dtype, memory)}


def pattern_settings(
    config: PretrainedConfig,
    attention: AttentionName | None,
    block_size: int | None,
    logit_shift: bool | None,
) -> dict[str, Any]:
    """The saved settings with this pattern, block size and shift; None: as saved, or causal for a stock
    model."""
    saved = STOCK_SETTINGS | (getattr(config, SETTINGS_KEY, None) or {})
    chosen: dict[str, Any]
    if attention is None or attention == saved["attention"]:
        given = {"block_size": block_size, "logit_shift": logit_shift}
        chosen = {name: value for name, value in given.items() if value is not None}
    else:
        chosen = {
            "attention": attention,
            "block_size": block_size,
            "logit_shift": logit_shift,
            "causal_context": False,
        }
    return {name: saved[name] for name in STOCK_SETTINGS} | chosen


def initialize(
    path: str | pathlib.Path,
    *,
    seed: int,
    dtype: str = "float32",
    device: str = "cpu",
    eos_token_ids: Sequence[int] | None = None,
    parse_special_tokens: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **hub_options: Any,
) -> DiffusionLM:
    """A causal model with new random weights, and the architecture and tokenizer found at `path`, or another
    `tokenizer`.

    Arguments as in `load`; `hub_options`: `revision` and `trust_remote_code`. generation_config.json is not
    read. Raises ModelError if there is no config or no tokenizer.
    """
    config, family = read_config(str(path), hub_options)
    if tokenizer is None:
        tokenizer = read_tokenizer(
            str(path), hub_options, config, family, parse_special_tokens=parse_special_tokens
        )
    else:
        tokenizer.parse_special_tokens = parse_special_tokens
        text = config.get_text_config()
        text.vocab_size = len(tokenizer)
        text.bos_token_id, text.eos_token_id, text.pad_token_id = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
    torch.manual_seed(seed)
    with reading("cannot build the model", str(path), "Check config.json"):
        model = random_model(config, _dtype(dtype)).to(resolve_device(device))
    return make_diffusion(model, tokenizer, eos_token_ids=eos_token_ids)


def random_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with new random weights in every row: transformers would zero the padding token's, which may be
    the EOS."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    padding, text.pad_token_id = text.pad_token_id, None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = padding
    return model


def make_diffusion(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    attention: AttentionName = "causal",
    block_size: int | None = None,
    logit_shift: bool | None = None,
    eos_token_ids: Sequence[int] | None = None,
    padding_idx: int | None = None,
    **others: Any,
) -> DiffusionLM:
    """A DiffusionLM of a model in memory, whose attention function, mask token and end tokens it changes in
    place.

    `padding_idx` is the token whose embedding gets no gradient; None: all do, also where the architecture has
    one by default. Padding is never read, but its token is often the EOS, which is. `others` are further
    arguments of `DiffusionLM`.

    Raises:
        ModelError: the architecture mixes tokens other than by the attention interface of transformers, or
            computes something else under Unmask's attention (`unmask.models.agreement`), or an end token is
            outside the vocabulary.
    """
    name = type(model).__name__
    model.set_attn_implementation(ATTENTION_NAME)  # without pluggable attention transformers only warns
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            "attention is built into the modeling code",
            where=name,
            remedy="Use an architecture with pluggable attention",
        )
    if model._is_stateful:
        raise ModelError(
            "its recurrent layers read from left to right under any mask",
            where=name,
            remedy="Use a transformer",
        )
    _check_layers(model)
    with _loading_unsharded():
        first = first_position(model)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped products do not support it
    check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], where=name)
    _add_mask_token(model, tokenizer)
    model.get_input_embeddings().padding_idx = padding_idx
    return DiffusionLM(
        model.eval(),
        tokenizer,
        attention=attention,
        block_size=block_size,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=resolve_end_tokens(model, tokenizer, eos_token_ids),
        logit_shift=attention == "causal" if logit_shift is None else logit_shift,
        first_position=first,
        **others,
    )


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError if a layer mixes tokens other than by the attention mask: convolutions, linear
    attention, chunks."""
    text = model.config.get_text_config()
    masked = {"full_attention", "sliding_attention"}
    if (getattr(text, "attention_chunk_size", None) or 0) >= (
        getattr(text, "max_position_embeddings", None) or math.inf
    ):
        masked.add("chunked_attention")  # one chunk
    if unmasked := set(getattr(text, "layer_types", None) or ()) - masked:
        raise ModelError(
            f"its layers of type {', '.join(map(repr, sorted(unmasked)))} ignore the attention mask",
            where=type(model).__name__,
            remedy="Use a transformer whose layers are all full or sliding attention",
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, where: str) -> None:
    """Raise ModelError if a token other than the mask token has no row in the embeddings."""
    if len(tokenizer) <= rows:
        return
    if without := [
        token
        for token, number in tokenizer.get_vocab().items()
        if number >= rows and number != tokenizer.mask_token_id
    ]:
        raise ModelError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the embedding table only {rows:,} rows "
            f"(none for {without[0]!r})",
            where=where,
            remedy="Use the tokenizer that belongs to the model, or resize its embeddings and train them",
        )


def as_diffusion_lm(
    model: DiffusionLM | PreTrainedModel | str | pathlib.Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DiffusionLM:
    """The DiffusionLM of a DiffusionLM, a path or hub id, or a causal model of transformers with its
    tokenizer. Raises ModelError for anything else."""
    if isinstance(model, DiffusionLM):
        return model
    if isinstance(model, str | pathlib.Path):
        return load(model)
    if isinstance(model, PreTrainedModel) and tokenizer is not None:
        align_weights(model)
        return make_diffusion(model, tokenizer)
    remedy = "Give a DiffusionLM, a path, or a model of transformers with its tokenizer as processing_class"
    raise ModelError(f"cannot use a {type(model).__name__}", where="model", remedy=remedy)


def with_pattern(
    lm: DiffusionLM,
    attention: AttentionName,
    block_size: int | None = None,
    logit_shift: bool | None = None,
    *,
    causal_context: bool = False,
    **others: Any,
) -> DiffusionLM:
    """The same weights with another pattern, to convert them, or with `others` of `STOCK_SETTINGS`; those
    that are None or left out stay as they are. `logit_shift` defaults as in `load`."""
    kept = {name: lm.settings[name] for name in STOCK_SETTINGS}
    pattern = {
        "attention": attention,
        "block_size": block_size,
        "logit_shift": logit_shift,
        "causal_context": causal_context,
    }
    changed = {name: value for name, value in others.items() if value is not None}
    return make_diffusion(lm.model, lm.tokenizer, **kept | pattern | changed)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}", where="dtype", remedy=f"Use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _quantization(name: Quantization, dtype: torch.dtype) -> BitsAndBytesConfig:
    if name not in ("4bit", "8bit"):
        raise ModelError(f"unknown quantization {name!r}", where="quantization", remedy="Use 4bit or 8bit")
    if dtype == torch.float64:
        raise ModelError(
            f"{name} weights do not compute in float64", where="dtype", remedy="Use float32 or bfloat16"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{name} weights need bitsandbytes",
            where="quantization",
            remedy="Install it with pip install 'unmask[cuda]'",
        )
    if name == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    # NF4 and double quantization: Dettmers et al. 2023, QLoRA.
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _load_model(
    where: str, config: PretrainedConfig, dtype: torch.dtype, options: dict, family: Family | None
) -> PreTrainedModel:
    remedy = "Give a causal language model with safetensors weights"
    # the config's could be a kernel on a hub; ours replaces it
    options |= {"use_safetensors": True, "attn_implementation": "eager"}
    converting = family.converting() if family else contextlib.nullcontext()
    with reading("cannot load the weights", where, remedy), _loading_unsharded(), converting:
        model, info = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, output_loading_info=True, **options
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # At the first evaluation on a CPU, bitsandbytes would permanently repack quantized weights with
            # rounded scales.
            module.support_avx512bf16_for_cpu = False
    refuse_missing(info, where, remedy)
    if family:
        if info["unexpected_keys"]:
            unknown = ", ".join(sorted(info["unexpected_keys"]))
            raise ModelError(
                f"no {family.name} model has the weights {unknown}",
                where=where,
                remedy=f"Give a {family.architecture}",
            )
        model._weight_conversions = None  # else transformers would save it under the published names
    return model


@contextlib.contextmanager
def _loading_unsharded() -> Iterator[None]:
    """Let transformers load whole weights. With ZeRO 3 it would partition them before a mask token could
    be added; the trainer partitions them later."""
    reference = zero._hf_deepspeed_config_weak_ref
    zero.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        zero._hf_deepspeed_config_weak_ref = reference


@torch.no_grad()
def _add_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add a mask token to the tokenizer if it has none. The embedding of a new one starts as the mean of the
    others."""
    new, rows = tokenizer.mask_token_id is None, model.get_input_embeddings().weight.shape[0]
    if new:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    mask_id = tokenizer.mask_token_id
    if mask_id < rows and not new:
        return
    if mask_id >= rows:
        model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight[mask_id] = table.weight[: min(rows, mask_id)].mean(0)


def _load_module(
    module: torch.nn.Module, name: str, what: str, path_or_id: str, revision: str | None = None
) -> None:
    """Load the weights of a module that was saved with a model; stock classes do not. Raises ModelError if
    they are missing."""
    prefix = f"{name}."
    found: dict[str, torch.Tensor] = {}
    for shard in weight_files(path_or_id, revision):
        with safe_open(cached_file(path_or_id, shard, revision=revision), "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if found.keys() != module.state_dict().keys():
        raise ModelError(
            f"the weights lack the {what}", where=path_or_id, remedy="Save the model again with lm.save"
        )
    module.load_state_dict(found)
