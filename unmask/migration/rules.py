"""What becomes of an old key: the words in which the tables are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unmask.commands.older_variables import SWITCH

Old = Mapping[str, Any]
"""An old configuration: values by key."""
Settings = dict[str, Any]
"""Our settings, by dotted key."""


class DroppedError(Exception):
    """Raised by a rule for a value that has no counterpart; the message says why."""


class Rule(NamedTuple):
    """What becomes of an old key."""

    read: Callable[[Any, Old], Settings]
    """The settings that a value means, beside the other old ones. Raises DroppedError for one without counterpart, ValueError or KeyError
    for one that means nothing."""
    why: str = ""
    """Why it is changed, for the report."""


Table = dict[str, Rule]


def to(key: str, convert: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """The setting that took the key's place."""
    return Rule(lambda value, old: {key: convert(value) if convert else value}, why)


def same(*keys: str) -> Table:
    """Keys that are settings of `training` by the same name."""
    return {key: to(f"training.{key}") for key in keys}


def drop(why: str) -> Rule:
    """A key without counterpart."""

    def read(value: Any, old: Old) -> Settings:
        raise DroppedError(why)

    return Rule(read)


def dropped(*keys: str, why: str) -> Table:
    """Keys without counterpart, for one reason."""
    return {key: drop(why) for key in keys}


def truth(value: Any) -> bool:
    """A switch: true, false, or a word or number that means one.

    Raises:
        KeyError: it means neither.
    """
    return SWITCH[str(value).lower()]


def switch(key: str, why: str = "") -> Rule:
    """A setting that is on or off."""
    return to(key, truth, why)


def words(**known: Any) -> Callable[[Any], Any]:
    """Other words for the same; unknown ones are dropped."""

    def read(value: Any) -> Any:
        if value not in known:
            raise DroppedError(f"{value!r} has no counterpart; known: {', '.join(known)}")
        return known[value]

    return read


def precision(value: Any, old: Old) -> Settings:
    """Mixed precision from bf16, fp16 or a word that turns it off."""
    word = "no" if str(value).lower() in ("no", "false", "none", "fp32", "float32") else str(value).lower()
    word = {"bfloat16": "bf16", "float16": "fp16"}.get(word, word)
    if word not in ("bf16", "fp16", "no"):
        raise ValueError
    return {f"training.{name}": name == word for name in ("bf16", "fp16")}


def first_of(value: Any) -> Any:
    """The only element of a list, or the value itself."""
    if isinstance(value, list):
        (value,) = value
    return value


def lora_if(switch_key: str | None, names: Mapping[str, str]) -> Table:
    """Adapters: `names` has the old keys of r, alpha, dropout and target_modules. They apply if the switch is on; None: always."""

    def on(old: Old) -> bool:
        return switch_key is None or truth(old.get(switch_key, False))

    def field(name: str) -> Rule:
        def read(value: Any, old: Old) -> Settings:
            if not on(old):
                raise DroppedError(f"{switch_key} is off: the weights themselves are trained")
            return {f"lora.{name}": modules(value) if name == "target_modules" else value}

        return Rule(read)

    table = {old_key: field(name) for name, old_key in names.items()}
    if switch_key is not None:

        def turn(value: Any, old: Old) -> Settings:
            given = [names[name] for name in names if old.get(names[name]) is not None]
            if not truth(value):
                return {"lora": None}
            return {} if given else {"lora.r": 16, "lora.alpha": 32}

        table[switch_key] = Rule(turn, "adapters have a separate section")
    return table


def modules(value: Any) -> Any:
    """Names of layers: a list, or words with commas or spaces between them; all-linear stays a word."""
    if isinstance(value, str) and ("," in value or " " in value.strip()):
        return [name for name in value.replace(",", " ").split() if name]
    return value


TRANSFORMERS: Table = {
    "output_dir": to("output_dir", str),
    "overwrite_output_dir": switch("overwrite"),
    "evaluation_strategy": to("training.eval_strategy"),
    "gradient_checkpointing": switch("training.activation_checkpointing"),
    "gradient_checkpointing_kwargs": to("training.activation_checkpointing_kwargs"),
    "warmup_ratio": to("training.warmup_steps", why="below 1 it is a share of the steps"),
    "group_by_length": to("training.train_sampling_strategy", lambda value: "group_by_length" if truth(value) else "random"),
    "no_cuda": switch("training.use_cpu"),
    **same("learning_rate", "seed"),
    **dropped("resume_from_checkpoint", why="give --resume PATH on the command line"),
    "logging_dir": Rule(lambda value, old: logs_at(value, old)),
    **dropped("remove_unused_columns", "label_names", why="columns are kept as the verb needs them"),
    **dropped("label_smoothing_factor", "neftune_noise_alpha", why="a bound on the likelihood knows no smoothing and no noise"),
    **dropped("save_safetensors", why="weights are always saved as safetensors"),
    **dropped("local_rank", "ddp_backend", "local_process_index", why="the launcher says so"),
    **dropped("hub_token", "push_to_hub_token", why="secrets do not belong into a config: use `hf auth login`"),
    **dropped("_n_gpu", "fp16_opt_level", "half_precision_backend", "fp16_backend", "use_mps_device", "jit_mode_eval",
              "use_ipex", "torchdynamo", "tpu_num_cores", "tpu_metrics_debug", "past_index", "fp16_full_eval_backend",
              "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "include_tokens_per_second", "dispatch_batches",
              "split_batches", "mp_parameters", "ray_scope", "eval_use_gather_object", "use_legacy_prediction_loop",
              why="transformers has given it up, or never used it for training"),
}  # fmt: skip
"""Of `transformers.TrainingArguments`: fields that have another name, or none. All others keep their own."""


def logs_at(value: Any, old: Old) -> Settings:
    """Where TensorBoard writes; of others there is no folder to say."""
    if "tensorboard" not in str(old.get("report_to")):
        raise DroppedError("TensorBoard alone writes there, and report_to is another")
    return {"training.logging_dir": str(value)}


SETTINGS_OF_MODEL: Table = {
    "model_name_or_path": to("model.path", str),
    "model_revision": to("model.revision", str),
    "trust_remote_code": switch("model.trust_remote_code"),
    "attn_implementation": Rule(
        lambda value, old: attention(value), "FlashAttention 2 is a switch; otherwise the fastest exact kernel is taken"
    ),
    "load_in_4bit": Rule(lambda value, old: {"model.quantization": "4bit"} if truth(value) else {}, "one setting for both widths"),
    "load_in_8bit": Rule(lambda value, old: {"model.quantization": "8bit"} if truth(value) else {}, "one setting for both widths"),
    "model_init_kwargs": Rule(lambda value, old: loading(value), "arguments of from_pretrained are settings of model"),
    "torch_dtype": Rule(lambda value, old: weights_in(value)),
    "dtype": Rule(lambda value, old: weights_in(value)),
    **dropped("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", why="4 bits are NF4, quantised twice"),
    **dropped("ignore_bias_buffers", "router_aux_loss_coef", "disable_dropout", why="not needed here"),
}
"""How peers name the model to load."""


def weights_in(value: Any) -> Settings:
    """The type of the weights; float16 is for computing only."""
    name = str(value).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}.get(name, name)
    if name == "auto":
        raise DroppedError("weights are float32 unless model.dtype says otherwise")
    if name == "float16":
        return {"model.dtype": "float32", "training.fp16": True}
    return {"model.dtype": name}


def attention(value: Any) -> Settings:
    """FlashAttention where it is named; other kernels are chosen."""
    if not str(value).startswith("flash_attention"):
        raise DroppedError("the fastest exact kernel is taken")
    return {"training.flash_attention": True}


def loading(value: Mapping[str, Any]) -> Settings:
    """Arguments of `from_pretrained`.

    Raises:
        ValueError: there is one that no setting stands for.
    """
    settings: Settings = {}
    for key, part in value.items():
        rule = SETTINGS_OF_MODEL.get({"revision": "model_revision"}.get(key, key))
        if rule is None:
            raise DroppedError(f"{key} has no counterpart")
        try:
            settings |= rule.read(part, {})
        except DroppedError:
            continue
    return settings
