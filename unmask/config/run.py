"""The settings of Unmask: typed, frozen, strict. An unknown key, a wrong type or a value out of range is a
`ConfigError` with its remedy.

`docs/configuration.md` explains how files, environment and command line are combined; `layers.py` combines
them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from unmask.config.base import Config, OnResume, listed, refused
from unmask.config.evaluation import EvaluationConfig
from unmask.config.layers import Layers
from unmask.config.sampler import SamplerConfig
from unmask.config.user_code import load_module, naming_setting
from unmask.config.yaml import dump_yaml
from unmask.console import is_first_process
from unmask.errors import ConfigError, TrainingError, UnmaskError, did_you_mean
from unmask.redaction import MASK, find_mask, masked

if TYPE_CHECKING:
    import peft

Arguments = TypeVar("Arguments")
AttentionName = Literal["causal", "block_causal", "bidirectional"]
NoiseName = Literal["masked", "uniform", "hybrid"]
ACTS, NEUTRAL = OnResume.ACTS, OnResume.NEUTRAL
TRAIN = "train:"
# from the bytes and special tokens to what memory can be reserved for
TOKENIZER_SIZES = range(259, 1_000_001)
READ = {
    *(
        "path",
        "tokenizer",
        "train",
        "eval",
        "chat_template",
        "data",
        "likelihood",
        "include_path",
        "ref_model",
    ),
    *("json_schema", "grammar", "against", "judge", "deepspeed", "fsdp_config"),
}
"""The names of settings, in any section, that name files or folders which a run reads."""
LOCK_FILE = ".lock"
"""The file in an output folder by which a run keeps others out (`training/run/lock.py`)."""


class ModelConfig(Config):
    """Which model, and how to read it: the arguments of `unmask.load`."""

    path: Annotated[str, NEUTRAL]
    """A folder, of a model or of a training run, or the name of a model on the Hugging Face hub."""
    attention: AttentionName | None = None
    """The attention pattern; unset: as saved, and causal for a stock model."""
    block_size: int | None = Field(default=None, ge=1)
    """The block of block-causal attention, in tokens; unset: as saved."""
    logit_shift: bool | None = None
    """Whether the output at position i - 1 predicts token i (as in causal models); unset: as saved; for a
    stock model True if causal."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """The type of the weights in memory; auto: as saved."""
    device: Annotated[str, NEUTRAL] = "cpu"
    """The torch device of the weights (cpu, cuda, cuda:1); auto: a GPU if there is one."""
    revision: str | None = None
    """The branch, tag or commit of a hub model; pin it for runs that must be repeatable."""
    trust_remote_code: Annotated[bool, NEUTRAL] = False
    """Whether to run Python code from the model's hub repository; for the command line only, a file may not
    set it."""
    device_map: Annotated[Literal["balanced"] | None, NEUTRAL] = None
    """balanced: spread the layers of one model over all GPUs of one process, by their memory; needs two GPUs
    or more."""
    eos_token_ids: list[int] | None = None
    """The tokens that end a text, besides the tokenizer's EOS; unset: as saved, and for other models those of
    generation_config.json, config.json and the chat template's end of turn."""
    parse_special_tokens: bool = False
    """Whether special tokens that texts spell, such as `</s>`, are read as tokens; unset: they stay text."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Hold the weights of the linear layers in 4 or 8 bits (bitsandbytes); to train such a model, set `lora`
    (QLoRA)."""

    def load_arguments(self) -> dict[str, Any]:
        """The arguments of `unmask.load`, besides the path."""
        return self.model_dump(exclude={"path", "from_scratch", "tokenizer"})


class StartConfig(ModelConfig):
    """Which model a training run starts from, and how to read it."""

    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """The type of the weights in memory, whatever they are saved in: training in float32 keeps small
    updates."""
    from_scratch: bool = False
    """Pre-training: take only the architecture and the tokenizer from `path`, and start from random
    weights."""
    tokenizer: Annotated[str | None, NEUTRAL] = None
    """The tokenizer of a model from scratch: train:SIZE, one of SIZE tokens that is trained on the training
    data; a folder or a hub name; unset: that of `path`."""

    @pydantic.field_validator("tokenizer")
    @classmethod
    def _check_tokenizer(cls, value: str | None) -> str | None:
        if (
            value
            and value.startswith(TRAIN)
            and not ((size := value.removeprefix(TRAIN)).isdecimal() and int(size) in TOKENIZER_SIZES)
        ):
            raise ConfigError(
                f"{value!r} has no size from 259 to 1,000,000",
                remedy=f"Give a number of tokens, as in {TRAIN}8000",
            )
        return value

    @property
    def tokenizer_size(self) -> int | None:
        """The size of the tokenizer to train; None: none is trained."""
        return (
            int(self.tokenizer.removeprefix(TRAIN))
            if self.tokenizer and self.tokenizer.startswith(TRAIN)
            else None
        )


class DataSource(Config):
    """One source of a mixture."""

    path: str = Field(min_length=1)
    """A file, folder or hub dataset, as in `data.train`."""
    weight: float = Field(default=1.0, gt=0)
    """Its weight in the mixture of rows (documents), relative to the other sources."""
    split: str | None = None
    """Its split; unset: `data.split`."""
    text_column: str | None = None
    """The column that holds its text; unset: `data.text_column`."""


class DataConfig(Config):
    """Which data, and how much of it."""

    train: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[list[DataSource], Field(min_length=1)] | None, NEUTRAL
    ] = None
    """A text, JSON-lines, CSV or Parquet file, a pattern of files (data/*.jsonl), a folder, or the name of a
    dataset on the Hugging Face hub; or several, mixed."""
    eval: Annotated[str | Annotated[list[DataSource], Field(min_length=1)] | None, ACTS] = None
    """Held-out data; unset: none, or generated by the task."""
    task: str | None = None
    """A task, which reads or generates rows, and scores completions: a built-in one (docs/tasks.md), or your
    own as file.py:NAME or package.module:NAME."""
    style: Literal["plain", "chat"] = "plain"
    """The format of a task's problems: plain text to complete, or messages for the model's chat template,
    with instructions."""
    split: str = "train"
    """The split, such as train, train[:10%], train+test or all."""
    text_column: str = "text"
    """The column that holds plain text."""
    chat_template: Annotated[str | None, NEUTRAL] = None
    """A chat template: simple, or a Jinja file; it is saved with the model. Unset: the tokenizer's own."""
    max_rows: int | None = Field(default=None, ge=1)
    """Training rows at most; unset: all."""
    eval_rows: Annotated[int, ACTS] = Field(default=200, ge=1)
    """Held-out rows at most."""
    streaming: bool = False
    """Read training text while training; pretrain and convert. Needs `training.max_steps`."""
    shuffle_buffer: int | None = Field(default=None, ge=2)
    """Size of the shuffle buffer of a stream; unset: rows keep the order of the source."""
    seed: int = 0
    """The random seed of generated rows, splits and shuffles."""

    def without_effect(self) -> Iterator[ConfigError]:
        if self.task is None:
            remedy = "Set data.task, or leave it out"
            yield ConfigError("has no effect without a task", where="style", remedy=remedy)

    def check(self) -> None:
        if self.shuffle_buffer is not None and not self.streaming:
            remedy = "Set data.streaming, or remove it"
            raise ConfigError("there is no stream to shuffle", where="shuffle_buffer", remedy=remedy)
        mixed = isinstance(self.train, list) or isinstance(self.eval, list)
        if self.task is not None and (self.streaming or mixed):
            remedy = "Give no stream and no mixture, or no task"
            raise ConfigError("a task reads whole files, one at a time", where="task", remedy=remedy)


class LoraSettings(Config):
    """Train low-rank adapters instead of the weights."""

    r: int = Field(default=16, ge=1)
    """The rank of an adapter."""
    alpha: float = Field(default=32, gt=0)
    """The scale: an adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of an adapter's inputs in training."""
    target_modules: str | list[str] = "all-linear"
    """The names of the layers that get adapters, a regular expression, or all-linear."""

    def to_peft(self) -> peft.LoraConfig:
        """The settings as a PEFT config."""
        import peft

        return peft.LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules,
            task_type="CAUSAL_LM",
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
    """Matrix products in bfloat16 without sparsity, in 1e12 operations a second; unset: no time is estimated
    (a CPU is benchmarked)."""
    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    """Memory bandwidth, in 1e9 bytes per second."""


class HardwareConfig(Config):
    """The machine that a run is estimated for (`unmask inspect`, `--dry-run`). The run itself uses the
    devices of this machine, and at most `max_memory_gb` of a GPU's memory."""

    on_resume = NEUTRAL

    name: str
    """Its name in the estimate."""
    devices: list[DeviceConfig] = Field(min_length=1)
    """The kinds of devices in a node. Among unequal ones the smallest determines the batch of all, the
    slowest the time."""
    nodes: int = Field(default=1, ge=1)
    """How many such nodes work together."""
    interconnect_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between the devices of a node, one way, in 1e9 bytes per second."""
    network_gb_s: float | None = Field(default=None, gt=0)
    """Bandwidth between nodes, per device, one way, in 1e9 bytes per second."""
    max_memory_gb: float | None = Field(default=None, gt=0)
    """Memory limit of each device in 1e9 bytes, for estimates and, on a GPU, for the run."""

    @property
    def count(self) -> int:
        """The number of devices in all nodes."""
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

    model: StartConfig
    """The model to start from."""
    data: DataConfig = DataConfig()
    """The training and evaluation data."""
    sampler: SamplerConfig = SamplerConfig()
    """How to generate in evaluations. Rollouts of reinforcement learning have settings of their own under
    `training`."""
    retention: EvaluationConfig | None = None
    """What to measure of the trained model and the one that it was made of; unset: nothing. Shown in the
    model card."""
    lora: LoraSettings | None = None
    """Low-rank adapters; unset: train the weights themselves."""
    training: dict[str, JsonValue] = Field(default_factory=dict)
    """Any field of `transformers.TrainingArguments` by its own name, and those that the verb adds."""
    hardware: HardwareConfig | None = None
    """The hardware that the run is estimated for; recorded, and read by `--dry-run`. Its `max_memory_gb`
    bounds the run on a GPU."""
    imports: Annotated[list[str], BeforeValidator(listed), NEUTRAL] = Field(default_factory=list)
    """Modules, or files, to import first: tasks and methods that they define are found by name. They must not
    come from a model or data."""
    rewards: Annotated[list[str], BeforeValidator(listed), NEUTRAL] = Field(default_factory=list)
    """Tasks (gsm8k, or sudoku/partial for another shaping), package.module:function or file.py:function,
    model:PATH_OR_ID (a sequence classifier), or the address of a reward server; unset: the task's."""
    output_dir: Annotated[str, NEUTRAL] = Field(min_length=1)
    """The folder for checkpoints, metrics and the resolved config."""
    overwrite: Annotated[bool, NEUTRAL] = False
    """Whether to write into an output_dir that is not empty."""


def import_modules(layers: Layers) -> None:
    """Import the modules that `imports` names. Raises ConfigError for one that cannot be imported."""
    with layers.naming_sources(), naming_setting("imports"):
        for source in checked(listed(layers.value_of("imports") or []), list[str], ""):
            load_module(source)


def resolve(layers: Layers) -> RunConfig:
    """The config of all sources together; errors name the source of a refused value, or of one whose secret a
    record has masked."""
    with layers.naming_sources():
        values = layers.merged()
        if (key := find_mask(values)) is not None:
            what, remedy = (
                f"holds {MASK} in the place of a secret, which is not recorded",
                "Give it again, on the command line",
            )
            raise ConfigError(what, where=key, remedy=remedy)
        return RunConfig(**values)


def to_yaml(config: Config) -> str:
    """YAML of every field, defaults included, that loads back as the same config, except that secrets are
    masked. A sampler's temperature is left out unless it is given, since models of uniform noise refuse a
    given one."""
    values = masked(config.model_dump())
    if isinstance(config, RunConfig) and "temperature" not in config.sampler.model_fields_set:
        del values["sampler"]["temperature"]
    return dump_yaml(values)


def check_output_folder(
    path: str | Path,
    *,
    overwrite: bool | None = None,
    resume: bool | None = None,
    inputs: Iterable[str | Path] = (),
) -> None:
    """Check that a verb may write into `path`: it is absent or empty, or the user allows it. Only the first
    process looks for files.

    Args:
        overwrite, resume: whether the user gives these options; None: the verb has none, and the error does
            not advise it.
        inputs: what the verb reads; a name that is no path is passed over.

    Raises:
        TrainingError: the folder is in use.
        ConfigError: `path` is or holds an input, or it or what should hold it is a file or may not be written
            to.
    """
    _refuse_unwritable(path := Path(path))
    if not resume:
        refuse_inputs(path, inputs)
    in_use = (
        is_first_process() and path.exists() and any(inside.name != LOCK_FILE for inside in path.iterdir())
    )
    if in_use and not (overwrite or resume):
        ways = {
            "Choose another": True,
            "continue with --resume": resume,
            "write into it with --overwrite": overwrite,
        }
        remedy = ", or ".join(way for way, given in ways.items() if given is not None)
        raise TrainingError("the output folder is not empty", where=str(path), remedy=remedy)


def inputs_of(settings: RunConfig) -> list[str]:
    """The files and folders that a run may read: the values of the settings `READ`, and the files of
    `file.py:NAME`."""
    found = [f"{settings.model.path}/model"]  # of the folder of a run
    left: list[tuple[str, Any]] = [("", settings.model_dump())]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif isinstance(value, str):
            found += [value] if name in READ else []
            found += [value.partition(".py:")[0] + ".py"] if ".py:" in value else []
    return found


def refuse_inputs(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ConfigError if an input is what is written, or in a folder that is."""
    for each in inputs:
        for place in _places(Path(each)) if str(each) and os.path.lexists(each) else ():
            if place.is_relative_to(output.resolve()):
                what = (
                    "is an input, and would be overwritten"
                    if place == output.resolve()
                    else f"holds an input, {each}"
                )
                raise ConfigError(what, where=str(output), remedy="Choose another output")


def _places(path: Path) -> list[Path]:
    """Where a file or a folder is, and where the links in the folder lead."""
    links = [each.resolve() for each in path.iterdir() if each.is_symlink()] if path.is_dir() else []
    return [path.resolve(), *links]


def refuse_existing(
    path: Path,
    remedy: str,
    *,
    overwrite: bool,
    inputs: Iterable[str | Path] = (),
    own: Callable[[Path], bool] = lambda path: False,
) -> None:
    """Raise ConfigError if a file to write exists and may not be overwritten, is an input, or cannot be
    written there.

    A file in a folder that is an input is not overwritten either, unless it is one that the command writes,
    as `own` tells.
    """
    if path.is_dir():
        raise ConfigError("is a folder, not a file", where=str(path), remedy="Name a file")
    inputs = [*inputs]
    refuse_inputs(path, inputs)
    if path.exists() and not overwrite:
        raise ConfigError("the file exists", where=str(path), remedy=remedy)
    for each in inputs:
        if (
            str(each)
            and path.exists()
            and path.resolve().is_relative_to(Path(each).resolve())
            and not own(path)
        ):
            raise ConfigError(
                f"is a file of an input, {each}, and would be overwritten",
                where=str(path),
                remedy="Choose another output",
            )
    _refuse_unwritable(path.parent)


def _refuse_unwritable(folder: Path) -> None:
    """Raise ConfigError if the folder, or the nearest one above it that exists, is a file or may not be
    written to."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise ConfigError("is a file, not a folder", where=str(nearest), remedy="Choose another output")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(
            "the folder cannot be written to",
            where=str(nearest),
            remedy="Permit writing, or choose another output",
        )


def build_training_args(
    cls: type[Arguments], mapping: Mapping[str, Any], where: str = "training", **fixed: Any
) -> Arguments:
    """An instance of `cls`, a dataclass that extends `transformers.TrainingArguments`, from a section of a
    config.

    Args:
        cls: the dataclass; values are checked against its annotations if pydantic supports these.
        mapping: values by field name.
        where: the section's name, for errors.
        fixed: fields that the run sets and the section may not.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value that `cls` refuses.
    """
    values = checked_fields(cls, mapping, where, fixed)
    try:
        return cls(**values, **fixed)
    except UnmaskError as error:
        keys = [f"{where}.{key}" for key in error.where.split(" and ")] if error.where else [where]
        raise error.moved(" and ".join(keys)) from error
    except ValueError as error:
        named = [
            key
            for key, value in values.items()
            if _mentions(str(error), key) or (isinstance(value, str) and _mentions(str(error), value))
        ]
        key = f"{where}.{named[0]}" if len(named) == 1 else where
        raise ConfigError(str(error).rstrip("."), where=key, remedy="Change it in this section") from error


def checked_fields(
    cls: type[Any], mapping: Mapping[str, Any], where: str, fixed: Collection[str] = ()
) -> dict[str, Any]:
    """The values of a section, checked to be fields of the dataclass with the right types.

    Args:
        cls, mapping, where: as in `build_training_args`.
        fixed: names of fields that the section may not set.

    Raises:
        ConfigError: an unknown key, or a wrong type.
    """
    known = {field.name for field in dataclasses.fields(cls) if field.init} - set(fixed)
    hints = typing.get_type_hints(cls, include_extras=True)
    refuse_unknown(mapping, known, where, fixed)
    return {key: checked(value, hints[key], f"{where}.{key}") for key, value in mapping.items()}


def refuse_unknown(
    keys: Iterable[str],
    known: Collection[str],
    where: str,
    fixed: Collection[str] = (),
    remedy_elsewhere: Callable[[str], str | None] = lambda key: None,
) -> None:
    """Raise ConfigError for a key that a section does not have, or that the run sets itself (`fixed`).
    `remedy_elsewhere`: what to do about a key of other sections; None: a similar key is meant."""
    for key in keys:
        if key in fixed:
            raise ConfigError(
                "is set by the run itself", where=f"{where}.{key}", remedy="Remove it from this section"
            )
        if key not in known:
            remedy = remedy_elsewhere(key) or did_you_mean(key, known)
            raise ConfigError("is not a known key", where=f"{where}.{key}", remedy=remedy)


def checked(value: Any, annotation: Any, where: str) -> Any:
    """The value, converted to the type of an annotation.

    Raises:
        ConfigError: it has another type; the error names `where`.
    """
    try:
        # strict: True is not the number 1
        return _adapter(annotation).validate_python(value, strict=isinstance(value, bool))
    except pydantic.errors.PydanticUserError:  # pydantic cannot check this annotation; the dataclass must
        return value
    except pydantic.ValidationError as error:
        raise refused(error.errors(), value, where) from None


@functools.cache
def _adapter(annotation: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))


def _mentions(message: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", message) is not None
