"""PEFT adapters on a model, and quantized weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn

from unmask.errors import ConfigError, ModelError, first_line
from unmask.models.diffusion_gemma import ADAPTED, TOWERS, Published
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating

if TYPE_CHECKING:
    import peft

WHERE = "lora (peft_config), target_modules or modules_to_save"


def has_adapters(lm: DiffusionLM) -> bool:
    """Whether the model has PEFT adapters."""
    return hasattr(lm.model, "merge_and_unload")


def quantized(lm: DiffusionLM) -> bool:
    """Whether the weights are quantized to 4 or 8 bits."""
    return getattr(lm.model, "is_quantized", False)


def with_adapters(lm: DiffusionLM, peft_config: peft.PeftConfig) -> DiffusionLM:
    """The model with PEFT adapters; only these are trained.

    Raises:
        ConfigError: PEFT finds no module for them, they train nothing, the model fails with them, they cannot
            be merged into the weights, or PEFT does not tie what `ensure_weight_tying` asks it to tie.
    """
    from peft import prepare_model_for_kbit_training

    if quantized(lm):  # 16-bit parameters become float32; the trainer sets checkpointing
        prepare_model_for_kbit_training(lm.model, use_gradient_checkpointing=False)
    tied = bool(_shared(lm.model))
    adapted = checked_adapters(add_adapters(lm, peft_config), peft_config)
    if tied and getattr(peft_config, "ensure_weight_tying", False) and not _stays_tied(adapted):
        raise ConfigError(
            f"PEFT does not train the embedding table and the head of {type(lm.model).__name__} as one",
            where="lora (peft_config), ensure_weight_tying",
            remedy="Leave it out: the two are then trained and saved apart",
        )
    return adapted


def checked_adapters(
    adapted: DiffusionLM, peft_config: peft.PeftConfig, *, saved: bool = True
) -> DiffusionLM:
    """A model with adapters that can be read, and `saved`. Raises ConfigError, as `with_adapters`, if they
    cannot."""
    _refuse_kind(peft_config)
    if saved and [*adapted.model.peft_config] != ["default"]:
        raise ConfigError(
            f"adapters of other names than default ({', '.join(adapted.model.peft_config)}) are saved in "
            "folders of their own",
            where=WHERE,
            remedy="Call get_peft_model without adapter_name, or merge them first",
        )
    if saved and not adapted.canvas and (reason := _unmergeable(adapted, peft_config)):
        raise ConfigError(
            f"{_kind(peft_config)} adapters cannot be merged into the weights ({reason})",
            where="lora (peft_config)",
            remedy="Name other modules, or use adapters that can be, such as plain LoRA",
        )
    if _loses_bias(adapted.model.get_output_embeddings()):
        raise ConfigError(
            "PEFT leaves out the bias of a head with trained rows",
            where="lora (peft_config), trainable_token_indices",
            remedy="Train the whole module with modules_to_save",
        )
    if error := _first_error(adapted):
        raise ConfigError(
            f"the model fails with them ({error})",
            where=WHERE,
            remedy="Name other modules, such as those of attention alone",
        )
    return adapted


def refuse_frozen(lm: DiffusionLM) -> None:
    """Raise ConfigError for a model that a trainer is to train, but of which nothing takes gradients."""
    if any(weight.requires_grad for weight in lm.model.parameters()):
        return
    if has_adapters(lm):
        remedy = "Name modules of this model (PeftModel.from_pretrained: is_trainable=True)"
        raise ConfigError("they train nothing", where=WHERE, remedy=remedy)
    raise ConfigError(
        "none of its weights takes gradients, as after merge_and_unload or load_adapter",
        where="model",
        remedy="Call model.requires_grad_(True), or train adapters (peft_config)",
    )


def _stays_tied(lm: DiffusionLM) -> bool:
    """Whether the table and the head share all their trained weights. Rows that the head never reads may be
    the table's alone."""
    parts, shared = (lm.model.get_input_embeddings(), lm.model.get_output_embeddings()), _shared(lm.model)
    trained = {id(weight) for part in parts for weight in part.parameters() if weight.requires_grad}
    return trained <= shared or _trains_unread_rows(lm, lm.model.active_peft_config)


def _trains_unread_rows(lm: DiffusionLM, peft_config: peft.PeftConfig) -> bool:
    """Whether rows are trained that no head reads: those of tokens that are never predicted."""
    rows = getattr(peft_config, "trainable_token_indices", None)
    return isinstance(rows, list) and set(rows) <= set(lm.never_predicted)


def _loses_bias(head: nn.Module) -> bool:
    """Whether PEFT trains rows of a head with a bias, which it then does not add."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    return any(
        isinstance(part, TrainableTokensLayer) and part.get_base_layer().bias is not None
        for part in head.modules()
    )


def _first_error(lm: DiffusionLM) -> str | None:
    """What the model raises in a pass over two tokens: a layer with adapters need not return what the layer
    did; None: nothing."""
    # they are elsewhere
    if any(weight.is_meta or hasattr(weight, "ds_id") for weight in lm.model.parameters()):
        return None
    try:
        with torch.no_grad(), evaluating(lm):
            lm.logits(torch.full((1, 2), lm.pad_token_id, device=lm.device))
            if lm.canvas:
                lm.mean_embeddings(torch.zeros(1, lm.vocab_size, device=lm.device))
    except Exception as error:  # modeling code raises anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _unmergeable(lm: DiffusionLM, peft_config: peft.PeftConfig) -> str | None:
    """Why PEFT cannot merge these adapters, tried on a copy without memory; None: it can."""
    if getattr(peft_config, "layer_replication", None):
        return "replicated layers share their weights"
    bases = [part.get_base_layer() for part in lm.model.modules() if hasattr(part, "get_base_layer")]
    changed = [id(base.weight) for base in bases if isinstance(base, nn.Linear)]
    if len(set(changed)) < len(changed):
        return "several of them change one weight"
    tensors = chain(lm.model.parameters(), lm.model.buffers())
    empty = {id(tensor): _without_memory(tensor) for tensor in tensors if not quantized(lm)}
    try:
        if empty:
            with warnings.catch_warnings(action="ignore"):
                copy.deepcopy(lm.model, empty).merge_and_unload()
    except Exception as error:  # PEFT's kinds raise anything
        if "meta" not in str(error).lower():  # else it needs the values
            return first_line(error) or type(error).__name__
    return None


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def add_adapters(lm: DiffusionLM, peft_config: peft.PeftConfig) -> DiffusionLM:
    """The model with PEFT adapters; quantized weights stay as they are. Raises ConfigError if PEFT cannot add
    them, or the model has some."""
    if has_adapters(lm):
        raise ConfigError(
            "the model has adapters, which are trained further",
            where="lora (peft_config)",
            remedy="Leave it out"
            if lm.canvas
            else "Leave it out, or merge them first (save_model of the trainer that trained them does)",
        )
    _refuse_kind(peft_config)
    peft_config = _without_fused_layers(lm, peft_config)
    if lm.canvas:
        peft_config = _of_text(peft_config)
    try:
        with _untied(lm) if _trains_unread_rows(lm, peft_config) else nullcontext():
            return of_adapted(lm, _wrapped(lm.model, peft_config))
    except Exception as error:  # PEFT's kinds raise anything
        what = f"PEFT cannot add {_kind(peft_config)} adapters ({first_line(error).rstrip('.')})"
        raise ConfigError(what, where=WHERE, remedy="Name modules of this model, or use LoRA") from error


def _without_fused_layers(lm: DiffusionLM, peft_config: peft.PeftConfig) -> peft.PeftConfig:
    """Let `all-linear` leave out the output layers of Mamba 2: its kernels read their weights alone, and PEFT
    refuses them for some types."""
    mambas = [name for name, part in lm.model.named_modules() if hasattr(part, "ssm_state_size")]
    if mambas and getattr(peft_config, "target_modules", None) == "all-linear":
        left_out = {f"{name.rpartition('.')[2]}.out_proj" for name in mambas}
        return replace(peft_config, exclude_modules=peft_config.exclude_modules or sorted(left_out))
    return peft_config


def _of_text(peft_config: peft.PeftConfig) -> peft.PeftConfig:
    """Let adapters of DiffusionGemma leave out what is not of the text and, where no layers are named, its
    experts, routers and self-conditioning."""
    named = getattr(peft_config, "target_modules", ())
    unnamed = named is None and _kind(peft_config) == "LORA" and not peft_config.target_parameters
    changes: dict[str, Any] = {"task_type": None}  # the class lacks methods that PEFT asks of causal models
    if named == "all-linear" or unnamed:
        changes["target_modules"] = ADAPTED
    elif named and hasattr(peft_config, "exclude_modules"):
        changes["exclude_modules"] = peft_config.exclude_modules or TOWERS
    return replace(peft_config, **changes)


def _refuse_kind(peft_config: peft.PeftConfig) -> None:
    """Raise ConfigError for what is no config of PEFT, for virtual tokens, which have no place in the layouts
    of a diffusion model, and for mixtures of adapters."""
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"a {type(peft_config).__name__} is no config of PEFT",
            where="lora (peft_config)",
            remedy="Give one, such as peft.LoraConfig(r=16)",
        )
    if peft_config.is_prompt_learning or _kind(peft_config) in ("ADAPTION_PROMPT", "XLORA"):
        raise ConfigError(
            f"{_kind(peft_config)} adapters change what the model reads, not its weights",
            where="lora (peft_config)",
            remedy="Use adapters of weights, such as LoRA",
        )


def _kind(peft_config: peft.PeftConfig) -> str:
    return str(getattr(peft_config.peft_type, "value", peft_config.peft_type))


def of_adapted(lm: DiffusionLM, model: Any) -> DiffusionLM:
    """The DiffusionLM of a model that PEFT has wrapped around that of `lm`."""
    from peft.utils.other import ModulesToSaveWrapper

    model.create_or_update_model_card = _no_card
    for config in model.peft_config.values():
        # else PEFT names the stock class of the base
        config.task_type = None if lm.canvas else config.task_type or "CAUSAL_LM"
    if lm.canvas:
        model._get_base_model_class = _published_class
        model.merge_and_unload = model.merge_adapter = _refuse_merge
    adapted = lm.bind(model)
    head = adapted.model.get_output_embeddings()
    if not isinstance(head, ModulesToSaveWrapper):
        adapted.select_rows_of(head)
        return adapted
    for trained in head.modules_to_save.values():
        if trained.bias is None:  # PEFT leaves it out of a head that it ties
            trained.bias = head.original_module.bias
        adapted.select_rows_of(trained)
    return adapted


def _no_card(folder: str) -> None:
    """Replaces PEFT's method, which writes a card without contents, or into the card that is there."""


def _published_class(**_: Any) -> type:
    """Replaces PEFT's method, which would name Unmask's class in the config of adapters."""
    return Published


def check_mergeable(lm: DiffusionLM, where: str = "adapters") -> None:
    """Raise ModelError for a DiffusionGemma, whose adapters cannot be merged."""
    if lm.canvas:
        _refuse_merge(where=where)


def _refuse_merge(*_: Any, where: str = "adapters", **__: Any) -> Never:
    """Also replaces PEFT's methods that merge adapters."""
    raise ModelError(
        "the encoder and the decoder share the weights under their adapters, and merging would add the "
        "changes of both to one tensor",
        where=where,
        remedy="Keep the adapters apart: unmask.load, and PEFT, read their folder with its base",
    )


def _wrapped(model: Any, peft_config: peft.PeftConfig) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # PEFT 0.21 reads it
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # `merged` takes care of that
        warnings.filterwarnings("ignore", "Model (with|has) `tie_word_embeddings=True`")
        # its way to initialize them from data is the caller's
        warnings.filterwarnings("ignore", "lora with eva initialization")
        # which it writes for stacked experts
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        return get_peft_model(model, peft_config, revision=getattr(model, "revision", None))


def with_trained_mask_row(peft_config: peft.PeftConfig, lm: DiffusionLM) -> peft.PeftConfig:
    """The config of adapters, with the full embedding row of the mask token.

    Raises:
        ConfigError: no config of PEFT, one with which it cannot train rows, or one that names the embedding
            table.
    """
    _refuse_kind(peft_config)
    if not hasattr(peft_config, "trainable_token_indices"):
        raise ConfigError(
            f"{type(peft_config).__name__} cannot train the embedding row of the mask token",
            where="lora (peft_config)",
            remedy="Use LoRA",
        )
    table = "." + next(
        name for name, module in lm.model.named_modules() if module is lm.model.get_input_embeddings()
    )
    for setting in ("target_modules", "modules_to_save"):
        named = getattr(peft_config, setting, None) or ()
        if not isinstance(named, str) and any(table.endswith(f".{name}") for name in named):
            raise ConfigError(
                "names the embedding table",
                where=f"lora (peft_config), {setting}",
                remedy="Leave it out: the row of the mask token is trained anyway",
            )
    tokens = peft_config.trainable_token_indices or []
    if isinstance(tokens, dict):
        raise ConfigError(
            "rows of the embedding table are named by module",
            where="lora (peft_config), trainable_token_indices",
            remedy="Give trainable_token_indices as a list of tokens",
        )
    return replace(peft_config, trainable_token_indices=sorted({*tokens, lm.mask_token_id}))


@contextmanager
def _untied(lm: DiffusionLM) -> Iterator[None]:
    """Let PEFT treat the head as untied from the embedding table, because it would compute the whole head
    again in each pass."""
    tied, lm.model.config.tie_word_embeddings = lm.model.config.tie_word_embeddings, False
    try:
        yield
    finally:
        lm.model.config.tie_word_embeddings = tied


def starts_at_base(lm: DiffusionLM) -> bool:
    """Whether the base model under the adapters is still the model before training: LoRA that starts at zero,
    no other trained weights."""
    if any(getattr(config, "bias", "none") != "none" for config in lm.model.peft_config.values()):
        return False
    weights = dict(lm.model.named_parameters())
    names = [
        (name, name.replace(".lora_A.", ".lora_B.").replace(".lora_embedding_A.", ".lora_embedding_B."))
        for name in weights
    ]
    pairs = [(weights[a], weights[b]) for a, b in names if a != b]
    return bool(pairs) and not any(a.any() and b.any() for a, b in pairs)


@torch.no_grad()
def merged(lm: DiffusionLM) -> DiffusionLM:
    """A copy of the model with its adapters merged into the weights. Quantized weights are dequantized, since
    rounding would lose most of the update. An embedding table and a head that were tied stay so only if the
    adapters change both alike. Raises ModelError for DiffusionGemma, whose adapters stay apart."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    check_mergeable(lm)
    model = lm.frozen_copy().model
    config, tied = model.active_peft_config, _untie(model)
    if quantized(lm):
        adapters = get_peft_model_state_dict(model, save_embedding_layers=False)
        model = _wrapped(model.unload().dequantize(), config)
        set_peft_model_state_dict(model, adapters)
    with warnings.catch_warnings(action="ignore"):  # of PEFT, that tied weights might not be saved
        whole = lm.bind(model.merge_and_unload())
    table, head = whole.model.get_input_embeddings(), whole.model.get_output_embeddings()
    whole.select_rows_of(head)
    if tied:
        for token in lm.never_predicted:  # the head's rows of these are never read
            head.weight[token] = table.weight[token]
        if torch.equal(head.weight, table.weight):
            head.weight = table.weight
    whole.model.config.tie_word_embeddings = head.weight is table.weight
    if not whole.model.config.tie_word_embeddings:
        _separate(whole.model)
    whole.model.requires_grad_(True)
    if whole.quality_head is not None:
        whole.quality_head.requires_grad_(False)
    return whole


def _shared(model: Any) -> set[int]:
    """The identities of the weights that the embedding table and the head have in common."""
    table, head = (
        {id(weight) for weight in part.parameters()}
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    return table & head


def _untie(model: Any) -> bool:
    """Give the head weights of its own, so that merging can change the table alone. Whether they were the
    table's."""
    shared = _shared(model)
    holders = [
        (part, name)
        for part in model.get_output_embeddings().modules()
        for name, w in part._parameters.items()
        if id(w) in shared
    ]
    for part, name in holders:
        part._parameters[name] = nn.Parameter(part._parameters[name].clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    return bool(holders)


def _separate(model: Any) -> None:
    """Copy weights that the model holds twice: where the config ties none, transformers loads each by its
    name (BERT ties a bias too)."""
    seen: set[int] = set()
    for part in model.modules():
        for name, weight in part._parameters.items():
            if id(weight) in seen:
                part._parameters[name] = nn.Parameter(weight.clone(), requires_grad=False)
            elif weight is not None:
                seen.add(id(weight))


def without_tables(lm: DiffusionLM) -> None:
    """Make PEFT save only adapters: it would also save embedding tables that have some, or rows that the base
    model lacks."""
    if has_adapters(lm):
        lm.model.save_pretrained = partial(
            type(lm.model).save_pretrained, lm.model, save_embedding_layers=False
        )
