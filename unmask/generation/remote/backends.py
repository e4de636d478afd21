"""Where completions for reinforcement learning come from: the model in process, `unmask serve`, or a vLLM server.

A server is given the weights that are trained through a folder that both can read. It forgets them when it dies: every rollout names
the weights that it is to be sampled from, and a server that came back without them is given them again.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from unmask.config.layers import API_KEY
from unmask.config.run import RolloutConfig, SamplerConfig
from unmask.errors import GenerationError, first_line
from unmask.generation.output import Generation, Trace
from unmask.generation.remote.http import HttpClient, RemoteError
from unmask.generation.remote.nccl import check_nccl
from unmask.generation.remote.protocol import OTHER_WEIGHTS, GenerateRequest, UpdateRequest, differences, model_facts, read_generation
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.generation.requests import checked_keys, encode_all
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM

BAD_REQUEST, UNKNOWN_MODEL = 400, 404
TRIES = 3


class Backend(Protocol):
    """Samples for a trainer. In a distributed run every process has its own, and calls `sync` when the others do."""

    def generate(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None) -> Generation:
        """Arguments and result as of `unmask.generate`."""
        ...

    def due(self, step: int | None) -> bool:
        """Whether weights must be sent before this rollout; None: before an evaluation, which is of the weights as they are."""
        ...

    def sync(self, lm: DiffusionLM, step: int) -> None:
        """Sample from these weights from now on. The first process of a run sends them; the others must wait for it before they sample.

        Args:
            lm: of the layout that the backend was made for; for a server that takes all weights with adapters merged in.
            step: the optimizer steps that the weights have had, by which they are called.
        """
        ...

    def close(self) -> None:
        """Give connections back; a server stays as it is."""
        ...


def make_backend(config: RolloutConfig, lm: DiffusionLM, output_dir: str | Path) -> Backend:
    """The backend that a config asks for.

    Args:
        lm: the model that is trained.
        output_dir: of the run, where weights for a server are written unless the config says where.

    Raises:
        GenerationError: the server is absent or holds another model, or vLLM is asked for a model that is not causal.
    """
    if config.backend == "local":
        return LocalBackend(lm)
    folder = Path(config.folder or Path(output_dir) / "rollout_weights").resolve()
    return (ServerBackend if config.backend == "server" else VLLMBackend)(config, lm, folder)


class LocalBackend:
    """The model that is trained, in process."""

    def __init__(self, lm: DiffusionLM):
        self.lm = lm

    def generate(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None) -> Generation:
        return generate(self.lm, prompts, config, keys)

    def due(self, step: int | None) -> bool:
        return False

    def sync(self, lm: DiffusionLM, step: int) -> None:
        """Nothing: it samples from the weights as they are."""

    def close(self) -> None: ...


class RemoteBackend:
    """What backends with a server share: which weights it should hold, and the folders that it reads them from.

    Attributes:
        version: the name of the weights that it was given; None: none yet.
    """

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        self.config, self.lm, self.folder = config, lm, folder
        self.api_key = config.api_key or os.environ.get(API_KEY)
        self.version: str | None = None
        self.source: Path | nn.Module = folder

    def due(self, step: int | None) -> bool:
        return self.version is None or step is None or step % self.config.sync_steps == 0

    def sync(self, lm: DiffusionLM, step: int) -> None:
        self.check_weights(lm)
        path = self.folder / f"step-{step}"
        self.version, self.source = str(path), lm.model if self.config.sync == "nccl" else path
        if os.environ.get("RANK", "0") != "0":
            return
        if self.source is path:
            self.write(lm, path)
        self.send()
        for other in self.folder.glob("step-*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    def write(self, lm: DiffusionLM, path: Path) -> None:
        """Write weights so that they are whole wherever they are seen under this name. Raises RemoteError where that cannot be."""
        staging = path.with_name(f"{path.name}-unfinished")
        for old in (staging, path):
            shutil.rmtree(old, ignore_errors=True)
        try:
            if self.config.sync == "lora":
                lm.model.save_pretrained(staging, save_embedding_layers=False)
            else:
                lm.save(staging)
            staging.rename(path)
        except (OSError, SafetensorError) as error:
            remedy = "Make room there, or set rollout.folder to another folder that both sides see"
            raise RemoteError(f"the weights cannot be written ({first_line(error)})", where=str(path), remedy=remedy) from error

    def check_weights(self, lm: DiffusionLM) -> None:
        """Raise GenerationError for a model whose weights do not stand alone, or has no adapters where these are asked for."""
        if self.config.sync == "lora":
            check_adapters(lm)
            return
        kind = type(lm.model).__name__
        if not isinstance(lm.model, PreTrainedModel):
            raise GenerationError(f"the weights of a {kind} do not stand alone", where="sync", remedy="Merge its adapters before")

    def send(self) -> None:
        """Have the server take the weights."""
        raise NotImplementedError


def check_adapters(lm: DiffusionLM) -> None:
    """Raise GenerationError for a model without adapters, or with some that vLLM does not compute as they are trained."""
    adapters = getattr(lm.model, "peft_config", None)
    if adapters is None:
        what = f"a {type(lm.model).__name__} has no adapters to send"
        raise GenerationError(what, where="sync", remedy="Train with lora, or set sync to disk")
    for config in adapters.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        foreign = [] if kind == "LORA" else [f"peft_type {kind}"]
        foreign += [name for name in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern") if getattr(config, name, None)]
        foreign += ["bias"] if getattr(config, "bias", "none") != "none" else []
        if foreign:
            what = f"vLLM does not compute adapters with {', '.join(foreign)} as they are trained"
            raise GenerationError(what, where="sync", remedy="Train plain LoRA adapters, or set sync to disk, which sends them merged")


class ServerBackend(RemoteBackend):
    """`unmask serve`: any model, with the tokens that it would give in process.

    Raises:
        GenerationError: the server is absent, or its model has another vocabulary, attention or architecture.
    """

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        super().__init__(config, lm, folder)
        url, kind = str(config.url), "`unmask serve`"
        self.http = HttpClient(url, kind, timeout=config.timeout, patience=config.patience, api_key=self.api_key)
        try:
            there = self.http.read(self.http.call("GET", "/health"), lambda answer: dict(answer["model"]))
            if differ := differences(there, model_facts(lm)):
                remedy = "Start `unmask serve` with the model that is trained"
                raise GenerationError(f"the server holds another model: {differ}", where=url, remedy=remedy)
        except GenerationError:
            self.close()
            raise

    def generate(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None) -> Generation:
        encoded = encode_all(self.lm.tokenizer, prompts, "prompts")
        request = GenerateRequest(prompts=encoded, config=config, keys=list(checked_keys(encoded, keys)), version=self.version)
        body = request.model_dump()
        try:
            answer = self.http.call("POST", "/generate", json=body)
        except RemoteError as error:
            if error.status != OTHER_WEIGHTS:
                raise
            self.send()  # it was started again
            answer = self.http.call("POST", "/generate", json=body)
        return self.http.read(answer, read_generation)

    def send(self) -> None:
        self.http.call("POST", "/update_weights", json=UpdateRequest(path=str(self.source), version=str(self.version)).model_dump())

    def close(self) -> None:
        self.http.close()


class VLLMBackend(RemoteBackend):
    """A vLLM server, for causal models. Its tokens are drawn with noise of its own; those of temperature 0 are the same as in process.

    Start it from a model that Unmask saved or exported, whose vocabulary has the mask token; docs/generation.md has the command.

    Of the traces, `sampled_log_probs` are those that tokens were drawn with if the server computes "processed_logprobs". In its default
    mode they are known at temperature 0 and, but for the share of the mask token, at temperature 1 without filters; else they are
    empty. `log_probs`, at temperature 1, are in "processed_logprobs" known at temperatures 0 and 1 without filters; else they are NaN.
    `entropies` are empty.

    Raises:
        GenerationError: the model is not causal, the weights cannot be sent as `sync` says, or the server is absent or holds a model
            without the mask token.
    """

    def __init__(self, config: RolloutConfig, lm: DiffusionLM, folder: Path):
        if not lm.autoregressive:
            shift = "" if lm.logit_shift else " without logit shift"
            what = f"vLLM decodes token by token, and this model is {lm.attention}{shift}"
            raise GenerationError(what, where="backend", remedy="Use backend 'server' or 'local'")
        if config.sync == "lora":
            check_adapters(lm)
        if config.sync == "nccl":
            check_nccl()
        super().__init__(config, lm, folder)
        self.adapter = f"unmask-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"  # runs with adapters may share a server
        options: dict[str, Any] = {"timeout": config.timeout, "patience": config.patience, "api_key": self.api_key}
        self.remote = RemoteLM(str(config.url), lm.tokenizer, config.model, eos_token_ids=lm.eos_token_ids, **options)
        try:
            self.processed = self._probe()
        except GenerationError:
            self.close()
            raise

    def generate(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None) -> Generation:
        made = self._complete(prompts, config.model_copy(update={"trace": False}), keys)
        filters = (config.top_p < 1, config.top_k, config.repetition_penalty != 1, config.allowed_tokens, config.forbidden_tokens)
        plain = config.temperature in (0, 1) and not any(filters)
        sampled: list[list[float]] | None = made.log_probs if self.processed or plain else None
        if config.temperature == 0:
            sampled = [[0.0] * len(tokens) for tokens in made.tokens]
        if self.processed and not plain:
            made = replace(made, log_probs=[[math.nan] * len(tokens) for tokens in made.tokens])
        if not config.trace:
            return made
        traces = []
        for row, tokens in enumerate(made.tokens):
            rest = config.max_new_tokens - len(tokens)
            canvas, steps = tokens + [self.lm.mask_token_id] * rest, made.steps[row] + [-1] * rest
            drawn = sampled[row] + [0.0] * rest if sampled else []
            traces.append(Trace(canvas, steps, made.log_probs[row] + [0.0] * rest, drawn, forward_passes=len(tokens)))
        return replace(made, trace=traces)

    def send(self) -> None:
        if self.config.sync == "lora":
            if os.path.isabs(version := self.remote.weight_version):
                remedy = "Start the server again, with the model that the run began with"
                raise GenerationError(f"the server's own weights are from {version}", where=str(self.config.url), remedy=remedy)
            self.remote.load_adapter(self.adapter, str(self.source))
        else:
            self.remote.update_weights(self.source)
            self.remote.weight_version = str(self.version)

    def close(self) -> None:
        self.remote.close()

    def _complete(self, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None) -> Generation:
        """Completions by the weights that the server was given, all of them: one that died on the way is given them again. Adapters are
        asked for by their name, and a server that died does not know it."""
        if self.config.sync == "lora" and self.version is not None:
            self.remote.model = self.adapter
        for _ in range(TRIES):
            try:
                made = self.remote.generate(prompts, config, keys)
                if self.version is None or self.config.sync == "lora" or self.remote.weight_version == self.version:
                    return made
            except RemoteError as error:
                if self.version is None or error.status != UNKNOWN_MODEL:
                    raise
            self.send()
        raise self.remote.http.error("the server does not keep the weights that it is given", "Give every run a server of its own")

    def _probe(self) -> bool:
        """Whether the server computes the log-probabilities of the distributions that it draws from: of a single allowed token this is 0,
        and of two tokens the model gives to one at most a half."""
        log_probs = []
        for token in [token for token in range(3) if token != self.lm.mask_token_id][:2]:
            config = SamplerConfig(max_new_tokens=1, temperature=1.0, allowed_tokens=[token], stop_at_eos=False)
            try:
                log_probs += self.remote.generate([[token]], config).log_probs[0]
            except RemoteError as error:
                if error.status != BAD_REQUEST:
                    raise
                what = f"the server does not know the mask token ({error.what})"
                remedy = "Start it from a model that Unmask saved, or exported with --layout hf"
                raise GenerationError(what, where=str(self.config.url), remedy=remedy) from error
        return max(map(abs, log_probs)) < 0.1
