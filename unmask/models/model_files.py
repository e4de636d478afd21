"""The files of a model folder or hub repository, which may be anybody's: weights are read from safetensors
only, and whatever a library raises on them is a ModelError."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from unmask.artifacts import MAX_FILE, entries, irregular_file, read_file
from unmask.errors import ModelError, UnmaskError, first_line
from unmask.models.auto_config import MODEL_TYPE, SETTINGS_KEY, stock_config
from unmask.models.family import Family
from unmask.models.model_card import HISTORY_KEY
from unmask.models.model_paths import CONFIG, TEXTS, fetched_with, of_variant
from unmask.models.released_families import family_of

TOKENIZER = "tokenizer_config.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
LOCAL_TOKENIZERS = {"DreamTokenizer": "qwen2"}
"""Tokenizer classes of remote code, and the model types whose classes in transformers are equivalent."""
MAX_COUNT = 10_000
"""Layers or labels of a model at most: transformers makes something for each, which would take hours with
more."""
COUNTS = re.compile(r"\w*layers|n_layer|_?num_labels")


@contextmanager
def reading(what: str, where: str, remedy: str) -> Iterator[None]:
    """Raise every error that is not Unmask's as a ModelError with these words."""
    try:
        yield
    except UnmaskError:
        raise
    except Exception as error:  # user code: a folder's files make libraries raise anything
        known = isinstance(error, (OSError, ValueError, RuntimeError, AssertionError))
        reason = first_line(error) if known else f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{what} ({reason})", where=where, remedy=remedy) from error


def read_config(
    folder: str, *, trust_remote_code: bool = False, whole: bool = False
) -> tuple[PretrainedConfig, Family | None]:
    """The stock config of a model's folder, and the family of its published format. Adapters without a config
    have that of their base. Of a model with other towers it is that of its language model, unless `whole`."""
    code = {"trust_remote_code": trust_remote_code}
    folder = fetched_with(CONFIG, folder, **code)
    with reading("cannot load a model config", folder, "Give a model folder or a hub id"):
        refuse_irregular(pathlib.Path(folder))
        published, _ = PretrainedConfig.get_config_dict(folder, **code)
        if not isinstance(published, dict):
            raise ValueError("config.json is not a JSON object")
        _refuse_counts(published)
        family = family_of(published)
        if published.get("model_type") == MODEL_TYPE:
            config = stock_config(published, folder, trust_remote_code=trust_remote_code)
        elif family is None:
            config = AutoConfig.from_pretrained(folder, **code)
        else:
            config = family.read_config(published, folder)
        settings = getattr(config, SETTINGS_KEY, None)
        if not isinstance(settings, dict | None):
            raise ValueError(f"{SETTINGS_KEY!r} is not an object")
        return config if whole else language_config(config, published), family


def has_towers(config: PretrainedConfig) -> bool:
    """Whether a model has other towers (Qwen3.5's reads images) that the class of its language model in
    transformers leaves out."""
    text = config.sub_configs.get("text_config")
    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return None not in (text, made) and made is MODEL_FOR_CAUSAL_LM_MAPPING.get(text, None)


def language_config(config: PretrainedConfig, published: Mapping[str, Any]) -> PretrainedConfig:
    """The config of the language model in a model with other towers; of others the config itself."""
    if not has_towers(config):
        return config
    text = config.get_text_config()
    text.name_or_path, text.dtype = config.name_or_path, config.dtype or text.dtype
    for name in ("tie_word_embeddings", SETTINGS_KEY, HISTORY_KEY):  # which the whole model has
        if name in published:
            setattr(text, name, getattr(config, name))
    return text


def read_tokenizer(
    folder: str,
    config: PretrainedConfig | None = None,
    family: Family | None = None,
    *,
    trust_remote_code: bool = False,
    parse_special_tokens: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. `config` and `family` are what `read_config` returned.
    `parse_special_tokens`: whether special tokens that texts spell are tokens. Adapters without a tokenizer
    have that of their base."""
    remedy = "Save the tokenizer beside the model (tokenizer.save_pretrained)"
    code = {"trust_remote_code": trust_remote_code}
    folder = fetched_with(TOKENIZER, folder, **code)
    with reading("no usable tokenizer", folder, remedy):
        refuse_irregular(pathlib.Path(folder))
        if config is None:
            # a tokenizer may be without a config, which transformers reads for its class
            with suppress(OSError):
                _refuse_counts(PretrainedConfig.get_config_dict(folder, **code)[0])
        tokenizer = AutoTokenizer.from_pretrained(folder, **(_tokenizer_choice(folder) if family else code))
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty")
        templates = tokenizer.chat_template
        if not all(
            isinstance(each, str)
            for each in (templates.values() if isinstance(templates, dict) else [templates or ""])
        ):
            raise ValueError("its chat template is no text")
        if family:
            _name_mask_token(tokenizer, getattr(config, SETTINGS_KEY)["mask_token_id"], folder)
    tokenizer.parse_special_tokens = parse_special_tokens
    return tokenizer


def _tokenizer_choice(folder: str) -> dict[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained` that load a released tokenizer without remote code."""
    named = get_tokenizer_config(folder).get("tokenizer_class")
    # Without a config AutoTokenizer would read config.json, and ask about the remote code that it names.
    choice = (
        {"tokenizer_type": LOCAL_TOKENIZERS[named]}
        if named in LOCAL_TOKENIZERS
        else {"config": PretrainedConfig()}
    )
    return {"trust_remote_code": False, **choice}


def _name_mask_token(tokenizer: PreTrainedTokenizerBase, mask_token_id: int, where: str) -> None:
    """Make the token with this id the mask token, which released tokenizers do not declare. Raises ModelError
    if there is no such token."""
    token = tokenizer.convert_ids_to_tokens(mask_token_id) if mask_token_id < len(tokenizer) else None
    if token is None:
        raise ModelError(
            f"the tokenizer has no mask token {mask_token_id}",
            where=where,
            remedy="Use the tokenizer of the released model",
        )
    tokenizer.add_special_tokens({"mask_token": token})
    tokenizer.init_kwargs.pop("auto_map", None)  # which refers to code that is not saved with it


def _refuse_counts(published: Any) -> None:
    """Raise ValueError for a config with too many of something, also in the configs of its parts: building it
    would not end."""
    for name, value in published.items() if isinstance(published, dict) else enumerate(published):
        if isinstance(value, dict | list):
            _refuse_counts(value)
        elif isinstance(value, int) and value > MAX_COUNT and COUNTS.fullmatch(str(name)):
            raise ValueError(f"{name} is {value}, but at most {MAX_COUNT:,} are read")


def refuse_irregular(folder: pathlib.Path) -> None:
    """Raise ValueError for a FIFO or a device in a folder, which to read would hang, and for a text without
    end."""
    if name := irregular_file(folder):
        raise ValueError(f"{name} is not a file")
    for path in (each for each in entries(folder) if each.suffix in TEXTS and each.stat().st_size > MAX_FILE):
        raise ValueError(f"{path.name} has more than {MAX_FILE:,} bytes")


def refuse_pickled(where: str, variant: str | None = None) -> None:
    """Raise ModelError if the weights of a folder are not in safetensors files, or if the index names other
    files or other folders."""
    remedy = (
        "Give safetensors weights: model.save_pretrained of transformers writes them, on a machine where "
        "these files are trusted"
    )
    stored = {path.name for path in pathlib.Path(where).iterdir()}
    pickled = sorted(name for name in stored if name.endswith(PICKLED))
    if pickled and not any(name.endswith((".safetensors", SAFE_WEIGHTS_INDEX_NAME)) for name in stored):
        raise ModelError(
            f"its weights are pickled ({pickled[0]}): loading them could run code", where=where, remedy=remedy
        )
    for shard in weight_files(where, variant):
        if not shard.endswith(".safetensors") or "/" in shard or "\\" in shard:
            raise ModelError(
                f"{SAFE_WEIGHTS_INDEX_NAME} names {shard!r}, no safetensors file beside it",
                where=where,
                remedy=remedy,
            )


def refuse_missing(loading_info: Mapping[str, Any], where: str, remedy: str) -> None:
    """Raise ModelError if weights were missing: transformers initializes them with random numbers.
    `loading_info` is from_pretrained's."""
    if missing := loading_info["missing_keys"]:
        raise ModelError(f"the weights lack {', '.join(sorted(missing))}", where=where, remedy=remedy)


def weight_files(folder: str, variant: str | None = None) -> list[str]:
    """The names of the weight files: those of the index if there is one."""
    remedy = "Give a causal language model with safetensors weights"
    with reading("cannot load the weights", folder, remedy):
        index = pathlib.Path(folder, of_variant(SAFE_WEIGHTS_INDEX_NAME, variant))
        if not index.is_file():
            return [of_variant(SAFE_WEIGHTS_NAME, variant)]
        return sorted({str(name) for name in json.loads(read_file(index))["weight_map"].values()})
