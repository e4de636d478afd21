"""Loading any causal language model of transformers, or a released diffusion model, as a DiffusionLM."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import deepspeed as zero

from unmask.config.run import AttentionName
from unmask.errors import ConfigError, ModelError, did_you_mean
from unmask.models.adapters import checked_adapters, has_adapters, of_adapted
from unmask.models.agreement import REMEDY, first_position
from unmask.models.alignment import align_weights
from unmask.models.attention import ATTENTION_NAME, attention_layers
from unmask.models.auto_config import READ_AS, SETTINGS_KEY, UnmaskConfig, stock_config
from unmask.models.chat_template import resolve_end_tokens
from unmask.models.device_map import resolve_device, split_layers
from unmask.models.diffusion_gemma import canvas_pattern, prepare
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.family import Family
from unmask.models.hooks.quality_head import NAME as QUALITY_HEAD
from unmask.models.hooks.quality_head import add_quality_head
from unmask.models.hooks.time_embedding import NAME as TIME_EMBEDDING
from unmask.models.hooks.time_embedding import add_time_embedding
from unmask.models.model_card import CACHED, HISTORY_KEY, hub_id
from unmask.models.model_files import (
    read_config,
    read_tokenizer,
    reading,
    refuse_missing,
    refuse_pickled,
    weight_files,
)
from unmask.models.model_paths import base_of_adapters, fetched, naming_adapters
from unmask.models.recurrent import recurrent_layers
from unmask.models.stored_adapters import stored_adapters
from unmask.names import LOADING

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
    "noise": "masked",
    "p_uniform": None,
}
NO_NOISE = {name: STOCK_SETTINGS[name] for name in ("noise", "p_uniform")}
Quantization = Literal["4bit", "8bit"]
WITHOUT_EFFECT = {
    *("low_cpu_mem_usage", "use_safetensors", "weights_only", "adapter_kwargs", "use_cache"),
    *("resume_download", "_fast_init", "_from_auto", "_from_pipeline", "_commit_hash"),
}
"""Arguments of `from_pretrained` that ask for what is done anyway."""
DOWNLOADING = {
    *("revision", "subfolder", "variant", "trust_remote_code"),
    *("token", "cache_dir", "local_files_only", "force_download"),
}
"""Arguments of `load` that say where the files of a model are."""
REFUSED = {
    **dict.fromkeys(("config", "generation_config"), "it is that of the folder, which the weights belong to"),
    **dict.fromkeys(
        ("state_dict", "key_mapping", "gguf_file", "from_pt", "from_tf", "from_flax"),
        "weights are read from safetensors files, under their own names",
    ),
    **dict.fromkeys(
        ("ignore_mismatched_sizes", "output_loading_info"),
        "weights that are missing, or of another shape, are an error",
    ),
    **dict.fromkeys(
        ("offload_folder", "offload_buffers", "offload_state_dict", "disable_mmap"),
        "weights are held in memory",
    ),
    **dict.fromkeys(
        ("tp_plan", "tp_size", "tensor_parallel_size", "device_mesh", "distributed_config"),
        "a model is loaded whole; training shards it (FSDP, DeepSpeed)",
    ),
    **dict.fromkeys(
        ("attn_implementation", "experts_implementation", "fusion_config"),
        "the attention is Unmask's, which has the masks of diffusion",
    ),
    **dict.fromkeys(
        ("output_hidden_states", "output_attentions", "return_dict"), "a forward pass gives logits alone"
    ),
    "is_trainable": "adapters of a folder can always be trained",
    **dict.fromkeys(
        ("use_kernels", "kernel_config", "allow_all_kernels"), "kernels from the hub are not run"
    ),
    "adapter_name": "a folder's adapters have one name",
    "code_revision": "code is that of `revision`",
    **dict.fromkeys(
        ("proxies", "mirror", "tqdm_class"), "downloads are those of huggingface_hub, which reads HTTPS_PROXY"
    ),
}
"""Arguments of `from_pretrained` that are not read, with the reasons."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types by their names in safetensors."""


def load(
    path_or_id: str | os.PathLike[str],
    attention: AttentionName | None = None,
    block_size: int | None = None,
    logit_shift: bool | None = None,
    dtype: str | torch.dtype | None = "auto",
    device: str | int | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    eos_token_ids: Sequence[int] | None = None,
    parse_special_tokens: bool = False,
    *,
    torch_dtype: str | torch.dtype | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    attn_implementation: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    **others: Never,
) -> DiffusionLM:
    """Load a causal language model, stock or saved by Unmask, a released diffusion model (docs/models.md), or
    adapters (PEFT) on their base, which trainers train further.

    Arguments that `from_pretrained` of transformers has, too, mean the same.

    Args:
        path_or_id: a local folder, of a model, of a training run or of adapters, or a hub id.
        attention: the pattern; None: as saved or released, and causal for a stock model.
        block_size: the attention block of a block-causal model; None: as saved.
        logit_shift: whether row i predicts token i + 1; None: as saved, or True for causal and False
            otherwise.
        dtype: a type of torch or its name (float32, bfloat16, float16, float64); "auto" or None: as saved.
        device: a torch device, or "auto": the GPU if there is one.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run modeling code of the model's repository.
        quantization: "4bit" (NF4, with quantized scales) or "8bit" weights of the linear layers, by
            bitsandbytes; embeddings and head stay in `dtype`. Such a model is trained with adapters only.
        device_map: "auto" or "balanced" spreads the layers over all GPUs of this process, by their memory, if
            there are several. A device, or `{"": device}`, is that device.
        eos_token_ids: the tokens that end a text, besides the tokenizer's EOS; None: as saved, and for other
            models those of generation_config.json, config.json and the chat template's end of turn.
        parse_special_tokens: read special tokens that texts spell, such as `</s>`, as tokens; otherwise they
            stay text.
        torch_dtype: the earlier name of `dtype`.
        quantization_config: the settings of bitsandbytes, in place of `quantization`.
        max_memory: bytes of each GPU that `device_map` may fill.
        attn_implementation: None only: Unmask's attention is the model's.
        subfolder: of the folder or repository.
        variant: of the weights: `fp16` for model.fp16.safetensors.
        token, cache_dir, local_files_only, force_download: of downloads from the hub.
        others: refused, with the reason; an error for type checkers.

    Returns:
        The model in eval mode. Its mask token is the tokenizer's, or a new one.

    Raises:
        ModelError: no model, tokenizer or safetensors weights there, or not all weights, an architecture
            without attention masks, a tokenizer with tokens that the embeddings lack, an end token outside
            the vocabulary, an unknown dtype, a missing device, or quantization without bitsandbytes.
        ConfigError: an unknown pattern, a block size that does not fit it, or an argument that is not read.
    """
    _refuse_others(others | {"attn_implementation": attn_implementation})
    if torch_dtype is not None:
        warnings.warn("torch_dtype is deprecated: use dtype", FutureWarning, stacklevel=2)
        dtype = torch_dtype if dtype in (None, "auto") else dtype
    dtype = "auto" if dtype is None else dtype
    folder = fetched(
        path_or_id,
        revision=revision,
        subfolder=subfolder,
        variant=variant,
        trust_remote_code=trust_remote_code,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
    )
    config, family = read_config(folder, trust_remote_code=trust_remote_code)
    tokenizer = read_tokenizer(
        folder,
        config,
        family,
        trust_remote_code=trust_remote_code,
        parse_special_tokens=parse_special_tokens,
    )
    chosen = pattern_settings(config, attention, block_size, logit_shift)
    refuse_unsupported(config, [chosen["attention"]])
    if (base := base_of_adapters(folder)) is not None:
        with naming_adapters(path_or_id):
            lm = load(
                base[0],
                revision=base[1],
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                quantization=quantization,
                device_map=device_map,
                quantization_config=quantization_config,
                max_memory=max_memory,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                force_download=force_download,
            )
        settings = chosen | {
            "time_embedding": lm.has_time_embedding,
            "quality_head": lm.quality_head is not None,
        }
        if eos_token_ids is not None:
            settings["eos_token_ids"] = eos_token_ids
        setattr(lm.config, HISTORY_KEY, getattr(config, HISTORY_KEY, []))
        return stored_adapters(make_diffusion(lm.model, tokenizer, **settings), folder)
    refuse_pickled(folder, variant)
    quantized = quantization or quantization_config
    if quantized:
        refuse_quantized(config)
    weight_dtype = _saved_dtype(config, folder, variant) if dtype == "auto" else _dtype(dtype)
    if quantized and dtype == "auto" and weight_dtype == torch.float64:  # in which they do not compute
        weight_dtype = torch.float32
    device, placement = _placement(config, weight_dtype, device, quantized, device_map, max_memory)
    options = {"trust_remote_code": trust_remote_code, "variant": variant}
    model = _load_model(folder, config, weight_dtype, options | placement, family)
    model = model if placement else model.to(device)
    # as adapters on it name it: by its name on the hub, or its absolute path
    source = str(Path(path_or_id).resolve()) if Path(path_or_id).exists() else str(path_or_id)
    if cached := CACHED.search(source):
        source, revision = hub_id(source) or source, revision or cached[2]
    config.name_or_path = tokenizer.name_or_path = model.name_or_path = source
    model.revision = revision
    with reading(
        "cannot use the model", folder, "Check config.json, generation_config.json and the tokenizer's files"
    ):
        align_weights(model)
        if eos_token_ids is not None:
            chosen["eos_token_ids"] = eos_token_ids
        if chosen["time_embedding"]:
            _load_module(add_time_embedding(model), TIME_EMBEDDING, "time embedding", folder)
        if chosen["quality_head"]:
            _load_module(add_quality_head(model), QUALITY_HEAD, "quality head", folder)
        lm = make_diffusion(model, tokenizer, **chosen)
        if lm.canvas:  # which keeps its vision tower
            lm.processor = {file.name: file.read_bytes() for file in Path(folder).glob("*processor*.json")}
        return lm


def check_patterns(
    path_or_id: str | Path, patterns: Sequence[AttentionName] | None, arguments: Mapping[str, Any]
) -> None:
    """Raise ModelError for a model that cannot be used, or not be converted to these attention patterns
    (None: it is read as `arguments` of `load` say). Its weights are not read."""
    how = {name: value for name, value in arguments.items() if name in DOWNLOADING}
    folder = fetched(path_or_id, weights=False, **how)
    config, _ = read_config(folder, trust_remote_code=bool(arguments.get("trust_remote_code")))
    if patterns is None:
        names = ("attention", "block_size", "logit_shift")
        patterns = [pattern_settings(config, *map(arguments.get, names))["attention"]]
    else:
        _refuse_conversion(config, str(path_or_id))
    refuse_unsupported(config, patterns)


def refuse_unsupported(config: PretrainedConfig, patterns: Sequence[AttentionName]) -> None:
    """Raise ModelError for an architecture that cannot be used, or not with these attention patterns."""
    if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        return  # the code comes with the weights
    with (
        reading("cannot build the model", str(config.name_or_path), "Check config.json"),
        _loading_unsharded(),
        torch.device("meta"),
    ):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    for attention in patterns:
        check_architecture(model, attention)


def _refuse_conversion(config: PretrainedConfig, where: str) -> None:
    """Raise ModelError for DiffusionGemma, whose pattern cannot be changed."""
    if canvas_pattern(config):
        what = "its canvases are a pattern of its own"
        remedy = "Fine-tune it (`unmask sft`), or take another model"
        raise ModelError(what, where=where, remedy=remedy)


def refuse_quantized(config: PretrainedConfig) -> None:
    """Raise ModelError for DiffusionGemma, most of whose weights cannot be."""
    if canvas_pattern(config):
        raise ModelError(
            "bitsandbytes quantizes neither stacked experts nor weights that encoder and decoder share, "
            "which are almost all of the model",
            where="quantization",
            remedy="Load it in bfloat16, and train adapters (LoRA)",
        )


def _refuse_others(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is not read, with the reason if transformers reads it."""
    for name, value in given.items():
        asked = value is not None and value is not False
        reason = REFUSED.get(name) if asked else None
        if name == "use_safetensors" and value is False:
            reason = "weights are read from safetensors files"
        if reason is not None:
            raise ConfigError(reason, where=name, remedy="Leave it out")
        if not (name in REFUSED or name in WITHOUT_EFFECT or (name in LOADING and not asked)):
            known = inspect.signature(load).parameters.keys() - {"others"}
            remedy = LOADING.get(name) or did_you_mean(name, known, "help(unmask.load) lists all")
            raise ConfigError(f"there is no argument {name!r}", where="load", remedy=remedy)


def _placement(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str | int | torch.device,
    quantization: Quantization | BitsAndBytesConfig | None,
    device_map: str | Mapping[str, Any] | None,
    max_memory: Mapping[int | str, Any] | None,
) -> tuple[str, dict[str, Any]]:
    """The device, and arguments of `from_pretrained` for weights that are spread over devices or quantized
    while loading; empty for others."""
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        device_map = device_map[""]
    spread = device_map in ("auto", "balanced")
    if device_map is not None and not spread:
        if isinstance(device_map, Mapping):
            raise ModelError(
                "a device for each part of the model",
                where="device_map",
                remedy='Use "auto" (by the memory of each GPU, which max_memory limits), or one device',
            )
        device, device_map = device_map, None
    memory = {
        number: torch.cuda.get_device_properties(number).total_memory
        for number in range(torch.cuda.device_count())
    }
    if device_map == "auto" and len(memory) < 2:
        device, device_map = "auto", None
    device = resolve_device(device if isinstance(device, int) else str(device))
    if device_map is None:
        if quantization is None:
            return device, {}
        return device, {
            "quantization_config": _quantization(quantization, dtype),
            "device_map": {"": device},
        }
    if quantization is not None:
        raise ModelError(
            "quantized weights are not spread over devices",
            where="device_map, quantization",
            remedy="Leave one of the two out",
        )
    if max_memory:
        from accelerate.utils import convert_file_size_to_int  # which device_map needs anyway

        memory |= {each: convert_file_size_to_int(max_memory[each]) for each in memory if each in max_memory}
    return device, {"device_map": split_layers(config, dtype, list(memory.values()))}


def pattern_settings(
    config: PretrainedConfig,
    attention: AttentionName | None,
    block_size: int | None,
    logit_shift: bool | None,
) -> dict[str, Any]:
    """The saved settings with this pattern, block size and shift; None: as saved, or causal for a stock
    model."""
    canvas = canvas_pattern(config)
    saved = STOCK_SETTINGS | canvas | (getattr(config, SETTINGS_KEY, None) or {})
    chosen: dict[str, Any]
    for name, value in {"attention": attention, "block_size": block_size, "logit_shift": logit_shift}.items():
        if canvas and value not in (None, canvas[name]):
            what = f"{value!r}, and that of a DiffusionGemma is {canvas[name]!r}"
            raise ConfigError(what, where=name, remedy="Leave it out for this model")
    if attention is None or attention == saved["attention"]:
        given = {"block_size": block_size, "logit_shift": logit_shift}
        chosen = {name: value for name, value in given.items() if value is not None}
    else:
        chosen = {
            "attention": attention,
            "block_size": block_size,
            "logit_shift": logit_shift,
            "causal_context": False,
            **(NO_NOISE if attention == "causal" else {}),
        }
    return {name: saved[name] for name in STOCK_SETTINGS} | chosen


def settings_in_memory(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of a model of transformers: as saved, but the pattern is that of a DiffusionLM which reads
    the model."""
    pattern = getattr(model, READ_AS, {})
    saved = pattern_settings(model.config, None, None, None)
    return {name: pattern.get(name, value) for name, value in saved.items()}


def initialize(
    path: str | Path,
    *,
    seed: int,
    dtype: str = "float32",
    device: str = "cpu",
    eos_token_ids: Sequence[int] | None = None,
    parse_special_tokens: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> DiffusionLM:
    """A causal model with new random weights, and the architecture and tokenizer found at `path`, or another
    `tokenizer`.

    Arguments as in `load`. generation_config.json is not read. Raises ModelError if there is no config or no
    tokenizer.
    """
    folder = fetched(path, weights=False, revision=revision, trust_remote_code=trust_remote_code)
    config, family = read_config(folder, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        tokenizer = read_tokenizer(
            folder,
            config,
            family,
            trust_remote_code=trust_remote_code,
            parse_special_tokens=parse_special_tokens,
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
    return make_diffusion(model, tokenizer, eos_token_ids=eos_token_ids, **canvas_pattern(config))


def of_config(
    config: UnmaskConfig, dtype: str | torch.dtype | None = None, attn_implementation: str | None = None
) -> DiffusionLM:
    """A diffusion model with new random weights, by its config, with the tokenizer of the folder or hub id
    that the config was read from. `dtype`: None: the config's.

    Raises:
        ModelError: a config that names no stock model or no tokenizer, or what `make_diffusion` raises.
        ConfigError: `attn_implementation` is not None, or the config has one.
    """
    _refuse_others({"attn_implementation": attn_implementation or config._attn_implementation})
    remedy = "Give the config of a diffusion model, from AutoConfig.from_pretrained(FOLDER)"
    with reading("cannot build the model", type(config).__name__, remedy):
        if not (where := config.name_or_path):
            raise ValueError("it names no folder with a tokenizer")
        stock = stock_config(config.to_dict(), where, trust_remote_code=False)
        tokenizer = read_tokenizer(fetched(where, weights=False), stock)
        model = random_model(stock, _dtype(dtype or stock.dtype or torch.float32))
        return make_diffusion(model, tokenizer, **pattern_settings(stock, None, None, None))


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
    first = check_architecture(model, attention)
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped products do not support it
    check_vocabulary(tokenizer, model.get_input_embeddings().weight.shape[0], where=type(model).__name__)
    if canvas_pattern(model.config):
        if tokenizer.mask_token_id is None:  # it marks hidden tokens in texts, and the model never reads it
            tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
        prepare(model)
    else:
        _add_mask_token(model, tokenizer)
    model.get_input_embeddings().padding_idx = padding_idx
    # FSDP looks for all of these, and a language model lacks its vision tower's
    model._no_split_modules = {type(part).__name__ for part in model.modules()} & {
        *(model._no_split_modules or ())
    }
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


def check_architecture(model: PreTrainedModel, attention: AttentionName) -> int:
    """The first position (`unmask.models.agreement`) of a model, whose attention function it changes. Raises
    the errors of `make_diffusion` that need no weights."""
    name = type(model).__name__
    model.set_attn_implementation(ATTENTION_NAME)  # without pluggable attention transformers only warns
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            "attention is built into the modeling code",
            where=name,
            remedy="Use an architecture with pluggable attention",
        )
    check_recurrent(model, attention)
    _check_layers(model)
    if canvas_pattern(model.config):
        return 0
    with _loading_unsharded():
        return first_position(model)


def check_recurrent(model: PreTrainedModel, attention: AttentionName) -> None:
    """Raise ModelError for bidirectional attention of a model with recurrent layers."""
    if attention == "bidirectional" and (layers := recurrent_layers(model)):
        raise ModelError(
            f"layer {layers[0].layer_idx} ({type(layers[0]).__name__}) reads from left to right under "
            "bidirectional attention too",
            where=type(model).__name__,
            remedy="Use block_causal attention (unmask convert: --recipe block)",
        )


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError if a layer mixes tokens other than by the attention mask, or a state: chunks, unknown
    recurrences."""
    text = model.config.get_text_config()
    recurrent = bool(recurrent_layers(model))
    if (recurrent or model._is_stateful) and not attention_layers(model):
        raise ModelError(
            "none of its layers is attention, so no token of a block would see a later one",
            where=type(model).__name__,
            remedy="Use a model that has attention layers, too (docs/models.md)",
        )
    known = {"full_attention", "sliding_attention"}
    if recurrent:
        known |= {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "moe", "mlp"}
    if (getattr(text, "attention_chunk_size", None) or 0) >= (
        getattr(text, "max_position_embeddings", None) or math.inf
    ):
        known.add("chunked_attention")  # one chunk
    for number, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in known:
            raise ModelError(
                f"layer {number}, of type {kind!r}, ignores the attention mask",
                where=type(model).__name__,
                remedy=REMEDY,
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
    model: DiffusionLM | PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    saved: bool = True,
) -> DiffusionLM:
    """The model that a trainer is given.

    Args:
        model: a DiffusionLM; a path or hub id, whose weights are read in float32, which keeps small updates;
            or a model of transformers, also with PEFT adapters, whose own settings count.
        tokenizer: of a model of transformers, or in place of the model's own; or its path or hub id.
        quantization_config: of a path or hub id.
        arguments: of `load`, likewise.
        saved: whether the trainer saves it.

    Raises:
        ModelError: anything else, a tokenizer of other tokens, or what `load` raises.
        ConfigError: a quantization or arguments of a model in memory.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = read_tokenizer(fetched(tokenizer, weights=False, model=False))
    if isinstance(model, str | Path):
        given = {"quantization_config": quantization_config, **(arguments or {})}
        if not given.keys() & {"dtype", "torch_dtype"}:
            given["dtype"] = "float32"
        return _with_tokenizer(load(model, **given), tokenizer)
    if quantization_config is not None:
        remedy = "Give the model's path, or quantize it when it is loaded"
        raise ConfigError("the model is loaded already", where="quantization_config", remedy=remedy)
    if arguments:
        remedy = "Give the model's path, or load it with them (on the command line the section model)"
        raise ConfigError("the model is loaded already", where="model_init_kwargs", remedy=remedy)
    if isinstance(model, DiffusionLM):
        return _with_tokenizer(model, tokenizer)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        lm = as_diffusion_lm(model.get_base_model(), tokenizer)
        return checked_adapters(of_adapted(lm, model), model.active_peft_config, saved=saved)
    if isinstance(own := getattr(model, "diffusion_lm", None), DiffusionLM):  # of the Auto classes
        return _with_tokenizer(own, tokenizer)
    if isinstance(model, PreTrainedModel) and tokenizer is not None:
        settings = settings_in_memory(model)
        if parts := [name for name in ("time_embedding", "quality_head") if settings[name]]:
            raise ModelError(
                f"its {parts[0].replace('_', ' ')} was not loaded with it",
                where=type(model).__name__,
                remedy="Give the path, or load it with unmask.load",
            )
        align_weights(model)
        return make_diffusion(model, tokenizer, **settings)
    remedy = "Give a DiffusionLM, a path, or a model of transformers with its tokenizer as processing_class"
    raise ModelError(f"cannot use a {type(model).__name__}", where="model", remedy=remedy)


def _with_tokenizer(lm: DiffusionLM, tokenizer: PreTrainedTokenizerBase | None) -> DiffusionLM:
    """The same model with another tokenizer of its tokens, which may have another chat template, and tokens
    for which the embeddings were resized."""
    if tokenizer is None or tokenizer is lm.tokenizer:
        return lm
    tokenizer.add_special_tokens({"mask_token": lm.tokenizer.mask_token})
    own, theirs = lm.tokenizer.get_vocab(), tokenizer.get_vocab()
    if not own.items() <= theirs.items():
        what = f"its {len(tokenizer)} tokens are not the {len(lm.tokenizer)} of the model's tokenizer"
        raise ModelError(what, where="processing_class", remedy="Leave it out, or give the model's own")
    if own != theirs:
        rows = lm.model.get_input_embeddings().weight.shape[0]
        check_vocabulary(tokenizer, rows, where="processing_class")
        lm.select_rows_of(lm.model.get_output_embeddings())  # which resizing replaces
    lm = copy.copy(lm)
    lm.tokenizer = tokenizer
    return lm


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
    that are None or left out stay as they are. `logit_shift` defaults as in `load`. Raises ModelError, as
    `make_diffusion`, for a pattern that the architecture does not have."""
    if has_adapters(lm):
        base = lm.bind(lm.model.get_base_model())
        changed = with_pattern(
            base, attention, block_size, logit_shift, causal_context=causal_context, **others
        )
        return of_adapted(changed, lm.model)
    _refuse_conversion(lm.model.config, type(lm.model).__name__)
    check_recurrent(lm.model, attention)
    lm.model.get_input_embeddings().padding_idx = lm.padding_idx  # also of a table that PEFT has wrapped
    kept = {name: lm.settings[name] for name in STOCK_SETTINGS if name != "padding_idx"}
    kept |= NO_NOISE if attention == "causal" else {}
    pattern = {
        "attention": attention,
        "block_size": block_size,
        "logit_shift": attention == "causal" if logit_shift is None else logit_shift,
        "causal_context": causal_context,
    }
    return DiffusionLM(
        lm.model.eval(),
        lm.tokenizer,
        mask_token_id=lm.mask_token_id,
        first_position=lm.first_position,
        **kept | pattern | {name: value for name, value in others.items() if value is not None},
    )


def _dtype(name: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise ModelError(
            f"unknown dtype {name!r}", where="dtype", remedy=f"Use one of auto, {', '.join(DTYPES)}"
        )
    return found


def _saved_dtype(config: PretrainedConfig, folder: str, variant: str | None) -> torch.dtype:
    """The type of the weights in a folder: the config's, or else that of a tensor there."""
    if config.dtype is not None:
        return _dtype(config.dtype)
    remedy, first = "Give a causal language model with safetensors weights", weight_files(folder, variant)[0]
    with reading("cannot load the weights", folder, remedy), safe_open(Path(folder, first), "pt") as file:
        kinds = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
    return next((FLOATS[kind] for kind in kinds if kind in FLOATS), torch.float32)


def _quantization(chosen: Quantization | BitsAndBytesConfig, dtype: torch.dtype) -> BitsAndBytesConfig:
    if isinstance(chosen, Mapping):
        chosen = BitsAndBytesConfig(**chosen)
    name = chosen
    if isinstance(chosen, BitsAndBytesConfig):
        name = "4bit" if chosen.load_in_4bit else "8bit"
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
    if isinstance(chosen, BitsAndBytesConfig):
        return chosen
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
        try:
            model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
        except TypeError as error:
            raise ModelError(
                "the tokenizer has no mask token, and adapters are on the tables that would get its row",
                where=type(model).__name__,
                remedy="Give the model without them, and their config as peft_config",
            ) from error
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        table.weight[mask_id] = table.weight[: min(rows, mask_id)].mean(0)


def _load_module(module: torch.nn.Module, name: str, what: str, folder: str) -> None:
    """Load the weights of a module that was saved with a model; stock classes do not. Raises ModelError if
    they are missing."""
    prefix = f"{name}."
    found: dict[str, torch.Tensor] = {}
    for shard in weight_files(folder):
        with safe_open(Path(folder, shard), "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    if found.keys() != module.state_dict().keys():
        raise ModelError(
            f"the weights lack the {what}", where=folder, remedy="Save the model again with lm.save"
        )
    module.load_state_dict(found)
