"""The settings of Unmask: typed, frozen, strict. An unknown key, a wrong type or a value out of range is a `ConfigError` with its remedy.

`docs/configuration.md` explains how files, environment and command line are combined; `layers.py` combines them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import ConfigDict, Field, JsonValue

from unmask.config.base import Config, refused
from unmask.config.layers import Layers
from unmask.config.rollout import RolloutConfig as RolloutConfig
from unmask.config.sampler import SamplerConfig as SamplerConfig
from unmask.config.yaml import dump_yaml
from unmask.errors import ConfigError, TrainingError, UnmaskError, did_you_mean

if TYPE_CHECKING:
    import peft

Arguments = TypeVar("Arguments")
AttentionName = Literal["causal", "block_causal", "bidirectional"]


class ModelConfig(Config):
    """Which model, and how to read it: the arguments of `unmask.load`."""

    path: str
    """A folder, or the name of a model on the Hugging Face hub."""
    attention: AttentionName | None = None
    """The attention pattern; unset: as saved, and causal for a stock model."""
    block_size: int | None = Field(default=None, ge=1)
    """The block of block-causal attention, in tokens; unset: as saved."""
    logit_shift: bool | None = None
    """Whether row i - 1 of the network predicts token i; unset: as saved, and for a stock model True if causal."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """The type of the weights in memory."""
    device: str = "cpu"
    """Where the weights live, as torch names it (cpu, cuda, cuda:1); auto: the fastest there is."""
    revision: str | None = None
    """The branch, tag or commit of a hub model; pin it for runs that must be repeatable."""
    from_scratch: bool = False
    """Pre-training: take only the architecture and the tokenizer from there, and start with new weights."""
    trust_remote_code: bool = False
    """Whether to run Python code from the model's hub repository."""
    device_map: Literal["balanced"] | None = None
    """balanced: spread the layers of one model over all GPUs of one process, by their memory; needs two GPUs or more."""
    eos_token_ids: list[int] | None = None
    """The tokens that end a text, besides the tokenizer's EOS; unset: as saved, and of other models those of generation_config.json,
    config.json and the chat template's end of turn."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Hold the weights of the linear layers in 4 or 8 bits (bitsandbytes); to train such a model, set `lora` (QLoRA)."""


class DataSource(Config):
    """One source of a mixture."""

    path: str
    """A file, folder or hub data set, as in `data.train`."""
    weight: float = Field(default=1.0, gt=0)
    """Its weight in the mixture of rows (documents), relative to the other sources."""
    split: str | None = None
    """The split of a hub data set; unset: `data.split`."""
    text_column: str | None = None
    """The column that holds its text; unset: `data.text_column`."""


class DataConfig(Config):
    """Which data, and how much of it."""

    train: str | Annotated[list[DataSource], Field(min_length=1)] | None = None
    """A text, JSON-lines, CSV or Parquet file, a folder, or the name of a data set on the Hugging Face hub; or several, mixed."""
    eval: str | Annotated[list[DataSource], Field(min_length=1)] | None = None
    """The same, held out; unset: none, or what the task generates."""
    task: str | None = None
    """A built-in task (docs/tasks.md), which reads or generates rows, and scores completions."""
    style: Literal["plain", "chat"] = "plain"
    """The format of a task's problems: plain text to complete, or messages for the model's chat template, with instructions."""
    split: str = "train"
    """The split of a hub data set."""
    text_column: str = "text"
    """The column that holds plain text."""
    chat_template: str | None = None
    """A chat template: simple, or a Jinja file; it is saved with the model. Unset: the tokenizer's own."""
    max_rows: int | None = Field(default=None, ge=1)
    """Training rows at most; unset: all."""
    eval_rows: int = Field(default=200, ge=1)
    """Held-out rows at most."""
    streaming: bool = False
    """Read training text as it is needed instead of before; pretrain and convert. Needs `training.max_steps` or `training.token_cache`."""
    shuffle_buffer: int | None = Field(default=None, ge=2)
    """Rows of a stream that are shuffled among each other; unset: they come in the order of the source."""
    seed: int = 0
    """The random seed of generated rows, splits and shuffles."""


class LoraSettings(Config):
    """Train low-rank adapters instead of the weights."""

    r: int = Field(default=16, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(default=32, gt=0)
    """The scale: an adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of an adapter's inputs in training."""
    target_modules: str | list[str] = "all-linear"
    """The names of the layers that get one, a regular expression, or all-linear."""

    def to_peft(self) -> peft.LoraConfig:
        """The same, for the PEFT library."""
        import peft

        return peft.LoraConfig(
            r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.target_modules, task_type="CAUSAL_LM"
        )


class DeviceConfig(Config):
    """One kind of device in a machine, by its vendor's figures."""

    name: str
    """The name of the device."""
    count: int = Field(default=1, ge=1)
    """How many of them a node has."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Its memory, in 1e9 bytes; unset: this machine's own."""
    tflops: float | None = Field(default=None, gt=0)
    """Matrix products in bfloat16 without sparsity, in 1e12 operations a second; unset: no time is planned (a CPU is timed)."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth, in 1e9 bytes per second."""


class HardwareConfig(Config):
    """The machine that a run is planned for (`unmask inspect`, `--dry-run`). The run itself takes the devices that are there, and of
    a GPU's memory at most `max_memory_gb`."""

    name: str
    """Its name in the estimate."""
    devices: list[DeviceConfig] = Field(min_length=1)
    """The kinds of devices in a node. Of unequal ones the smallest sets the batch of all, the slowest the time."""
    nodes: int = Field(default=1, ge=1)
    """How many such nodes work together."""
    interconnect_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between the devices of a node, one way, in 1e9 bytes per second."""
    network_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between nodes, per device, one way, in 1e9 bytes per second."""
    max_memory_gb: float | None = Field(default=None, gt=0)
    """The most memory to plan for and to take on each device, in 1e9 bytes. On a CPU it bounds the plan alone."""

    @property
    def count(self) -> int:
        """Devices of all nodes."""
        return sum(device.count for device in self.devices) * self.nodes

    @property
    def is_cpu(self) -> bool:
        return self.devices[0].name == "cpu"

    @property
    def slowest_link(self) -> float | None:
        """Bandwidth of the slowest link between devices, in 1e9 bytes per second; None for one device."""
        if self.count == 1:
            return None
        return self.network_gb_s if self.nodes > 1 else self.interconnect_gb_s


class RunConfig(Config):
    """A training run: `unmask pretrain | convert | sft | dpo | grpo`."""

    model: ModelConfig
    """The model to start from."""
    data: DataConfig = DataConfig()
    """What to train and evaluate on."""
    sampler: SamplerConfig = SamplerConfig()
    """How to generate, for evaluation and for rollouts."""
    lora: LoraSettings | None = None
    """Low-rank adapters; unset: train the weights themselves."""
    training: dict[str, JsonValue] = Field(default_factory=dict)
    """Any field of `transformers.TrainingArguments` by its own name, and those that the verb adds."""
    hardware: HardwareConfig | None = None
    """What the run is planned for; recorded, and read by `--dry-run`. Its `max_memory_gb` bounds the run on a GPU."""
    rewards: list[str] = Field(default_factory=list)
    """Tasks (gsm8k, or sudoku/partial for another shaping), package.module:function or file.py:function, model:PATH_OR_ID (a sequence
    classifier), or the address of an HTTP judge; unset: the task's."""
    output_dir: str = Field(min_length=1)
    """The folder for checkpoints, metrics and the resolved config."""
    overwrite: bool = False
    """Whether to write into an output_dir that is not empty."""


def resolve(layers: Layers) -> RunConfig:
    """The config that all sources together give; errors name the source of the refused value."""
    with layers.naming_sources():
        return RunConfig(**layers.merged())


def to_yaml(config: Config) -> str:
    """YAML of every field, defaults included, that loads back as the same config."""
    return dump_yaml(config.model_dump())


def resuming(resume: str | None, settings: RunConfig) -> tuple[str | bool, RunConfig]:
    """What a run goes on from, and its settings without it: `training.resume_from_checkpoint` says the same as `--resume`.

    Args:
        resume: of the command line: a path, or the empty text for the last checkpoint; None: not given.
        settings: as resolved.

    Returns:
        True for the last checkpoint in the output folder, a path, or False where the run begins.

    Raises:
        ConfigError: there is no such folder, or two are named.
    """
    training = dict(settings.training)
    setting = training.pop("resume_from_checkpoint", None) or None
    if resume and setting not in (None, True, resume):
        raise ConfigError(f"two checkpoints, {resume} and {setting}", where="--resume", remedy="Give one of them.")
    wanted = setting if resume is None else resume or setting or True
    settings = settings.model_copy(update={"training": training})
    if wanted is None or wanted is True:
        return bool(wanted), settings
    if not Path(str(wanted)).is_dir():
        raise ConfigError(f"there is no folder {wanted}", where="--resume", remedy="Name a checkpoint, or the folder of a run.")
    return str(wanted), settings


def continues(output_dir: str | Path, resume: str | bool) -> bool:
    """Whether a run goes on in its own output folder, and not from a checkpoint elsewhere."""
    return resume is True or (resume is not False and Path(resume).resolve().is_relative_to(Path(output_dir).resolve()))


def claim_output(path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make sure that a run may write into `path`: it is absent or empty, or the user asked for it. Nothing is created or deleted.

    Of several processes only the first looks: it may have begun to write when the others come here.

    Raises:
        TrainingError: the folder is in use, or `path` is a file.
    """
    path = Path(path)
    if os.environ.get("RANK", "0") != "0" or not path.exists():
        return
    if not path.is_dir():
        raise TrainingError("is a file, not a folder", where=str(path), remedy="Choose another output folder.")
    if any(path.iterdir()) and not (overwrite or resume):
        remedy = "Choose another, go on with --resume, or write into it with --overwrite."
        raise TrainingError("the output folder is not empty", where=str(path), remedy=remedy)


def build_training_args(cls: type[Arguments], mapping: Mapping[str, Any], where: str = "training", **fixed: Any) -> Arguments:
    """An instance of `cls`, a dataclass that extends `transformers.TrainingArguments`, from a section of a config.

    Args:
        cls: the dataclass; its annotations say what is allowed (those that cannot be checked are left to it).
        mapping: values by field name.
        where: the section's name, for errors.
        fixed: fields that the run itself sets, and the section may not.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value that `cls` refuses.
    """
    values = checked_fields(cls, mapping, where, fixed)
    try:
        return cls(**values, **fixed)
    except UnmaskError as error:
        keys = [f"{where}.{key}" for key in error.where.split(" and ")] if error.where else [where]
        raise ConfigError(error.what, where=" and ".join(keys), remedy=error.remedy) from error
    except ValueError as error:
        named = [
            key for key, value in values.items() if _mentions(str(error), key) or (isinstance(value, str) and _mentions(str(error), value))
        ]
        key = f"{where}.{named[0]}" if len(named) == 1 else where
        raise ConfigError(str(error).rstrip("."), where=key, remedy="Change it in this section.") from error


def checked_fields(cls: type[Any], mapping: Mapping[str, Any], where: str, fixed: Collection[str] = ()) -> dict[str, Any]:
    """The values of a section, each a field of a dataclass and of its type.

    Args:
        cls, mapping, where: as of `build_training_args`.
        fixed: names of fields that the section may not set.

    Raises:
        ConfigError: an unknown key, or a wrong type.
    """
    known = {field.name for field in dataclasses.fields(cls) if field.init} - set(fixed)
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in mapping:
        if key in fixed:
            raise ConfigError("is set by the run itself", where=f"{where}.{key}", remedy="Remove it from this section.")
        if key not in known:
            raise ConfigError("is not a known key", where=f"{where}.{key}", remedy=did_you_mean(key, known))
    return {key: checked(value, hints[key], f"{where}.{key}") for key, value in mapping.items()}


def checked(value: Any, annotation: Any, where: str) -> Any:
    """The value as this annotation has it.

    Raises:
        ConfigError: it is of another type; names `where` it stands.
    """
    try:
        adapter = pydantic.TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value, strict=isinstance(value, bool))  # strict: True is not the number 1
    except pydantic.errors.PydanticUserError:  # an annotation that pydantic cannot check: the dataclass itself must judge
        return value
    except pydantic.ValidationError as error:
        raise refused(error.errors(), value, where) from None


def _mentions(message: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", message) is not None
