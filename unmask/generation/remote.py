"""A causal model on a vLLM server, by the interface of `unmask.generate`: completions with log-probabilities, and new weights.

The server is started by its own means (`vllm serve MODEL`, with VLLM_SERVER_DEV_MODE=1 for new weights); docs/generation.md tells how.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx2 as httpx
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unmask.config import SamplerConfig
from unmask.diffusion.noise import sequence_key
from unmask.errors import GenerationError
from unmask.generation.requests import checked_keys, encode_all
from unmask.generation.trace import Generation
from unmask.generation.weights import nccl_sender

MEANT = {"max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop_at_eos", "allowed_tokens", "forbidden_tokens"}
MEANT |= {"seed", "batch_size"}
BANNED = -100.0  # the least bias that a server accepts


class RemoteError(GenerationError):
    """The server failed for good.

    Attributes:
        completed: what it had given until then, by the number of the prompt: token ids and their log-probabilities.
    """

    completed: dict[int, tuple[list[int], list[float]]]


class RemoteLM:
    """A causal model that a vLLM server holds.

    Args:
        url: of the server, such as http://localhost:8000.
        tokenizer: the model's, or the path to it.
        model: its name there; None: the only one.
        timeout: seconds to wait for an answer.
        patience: seconds to wait for a server that does not take requests, at the start or after it died.
        api_key: what the server was started with, if anything.

    Raises:
        GenerationError: the server is absent, or holds several models and none is named.
    """

    def __init__(
        self,
        url: str,
        tokenizer: str | PreTrainedTokenizerBase,
        model: str | None = None,
        *,
        timeout: float = 300.0,
        patience: float = 30.0,
        api_key: str | None = None,
    ):
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.patience = patience
        self._sender: tuple[nn.Module, Any] | None = None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=httpx.Timeout(timeout, connect=5.0), headers=headers, limits=limits)
        models = [card["id"] for card in self._call("GET", "/v1/models").json()["data"]]
        if model is None and len(models) != 1:
            raise GenerationError(f"serves {len(models)} models", where=url, remedy=f"Name one of {', '.join(models)}")
        self.model = model or models[0]

    def generate(self, prompts: Sequence[Any], config: SamplerConfig | None = None, keys: Sequence[int] | None = None) -> Generation:
        """Complete prompts; arguments and result as of `unmask.generate`. The noise is the server's own, seeded for every prompt by
        `config.seed` and its key; log-probabilities are those at temperature 1 (the server's default mode).

        Raises:
            GenerationError: settings that only diffusion knows, or a request that the server refuses.
            RemoteError: it stays away or silent; what was completed before is kept there.
        """
        config = config or SamplerConfig()
        default = SamplerConfig()
        for name in sorted(SamplerConfig.model_fields.keys() - MEANT):
            if getattr(config, name) != getattr(default, name):
                raise GenerationError("means nothing to a causal server", where=name, remedy="Leave it out")
        encoded = encode_all(self.tokenizer, prompts, "prompts")
        bodies = [self._body(ids, config, key) for ids, key in zip(encoded, checked_keys(encoded, keys), strict=True)]
        done: dict[int, tuple[list[int], list[float]]] = {}
        pool = ThreadPoolExecutor(max(1, min(config.batch_size, len(bodies))))
        waiting = {pool.submit(self._complete, body): index for index, body in enumerate(bodies)}
        try:
            try:
                for future in as_completed(waiting):
                    done[waiting[future]] = future.result()
            finally:
                pool.shutdown(cancel_futures=True)
        except RemoteError as error:
            given = {i: f.result() for f, i in waiting.items() if f.done() and not f.cancelled() and not f.exception()}
            error.completed = done | given
            error.args = (f"{error}; {len(error.completed)} of {len(bodies)} completions are done",)
            raise
        tokens = [done[index][0] for index in range(len(bodies))]
        log_probs = [done[index][1] for index in range(len(bodies))]
        return Generation(
            prompts=[list(ids) for ids in encoded],
            texts=[self.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
            tokens=tokens,
            log_probs=log_probs,
            steps=[list(range(len(ids))) for ids in tokens],
            forward_passes=[len(ids) for ids in tokens],
        )

    def update_weights(self, source: str | Path | nn.Module, address: str = "127.0.0.1") -> None:
        """Give the server new weights, and have it forget the keys that the old ones left.

        Args:
            source: a folder that the server can read; or a model on a GPU, whose weights go over NCCL to the server's own GPUs. That
                takes vLLM beside this package, and a server that was started with `--weight-transfer-config '{"backend": "nccl"}'`.
            address: of this machine, as the server's workers reach it (NCCL).

        Raises:
            GenerationError: NCCL is not to be had here, or the server refuses.
            RemoteError: it stays away or silent.
        """
        if not isinstance(source, nn.Module):
            self._call("POST", "/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": str(source)}})
        else:
            if self._sender is None or self._sender[0] is not source:
                self._sender = (source, nccl_sender(source, self._call, address))
            self._sender[1].send_weights()
        self.reset_prefix_cache()

    def close(self) -> None:
        """Give the connections back; the server stays as it is."""
        self._client.close()

    def __enter__(self) -> RemoteLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier prompts."""
        self._call("POST", "/reset_prefix_cache")

    def _body(self, ids: Sequence[int], config: SamplerConfig, key: int) -> dict[str, Any]:
        banned = {*(config.forbidden_tokens or ()), self.tokenizer.mask_token_id} - {None}
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or -1,
            "repetition_penalty": config.repetition_penalty,
            "ignore_eos": not config.stop_at_eos,
            "allowed_token_ids": config.allowed_tokens,
            "logit_bias": {str(token): BANNED for token in banned} or None,
            "seed": sequence_key([config.seed, key]),
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _complete(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        (choice,) = self._call("POST", "/v1/completions", json=body).json()["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def _call(self, method: str, path: str, **content: Any) -> httpx.Response:
        """One exchange; a server that takes no requests is asked again as long as there is patience."""
        where = str(self._client.base_url)
        deadline: float | None = None  # from the first failure on
        while True:
            try:
                response = self._client.request(method, path, **content)
            except httpx.TimeoutException as error:
                if not isinstance(error, httpx.ConnectTimeout):
                    remedy = "Raise timeout, or look at the server"
                    raise RemoteError(f"no answer within {self._client.timeout.read} seconds", where=where, remedy=remedy) from error
                deadline = self._wait(deadline, where, error)
            except httpx.TransportError as error:
                deadline = self._wait(deadline, where, error)
            else:
                if response.status_code in (502, 503, 504):
                    deadline = self._wait(deadline, where, RuntimeError(response.text))
                elif response.is_success:
                    return response
                else:
                    raise GenerationError(
                        f"{path} is refused ({response.status_code}): {response.text[:300]}", where=where, remedy="Mend the request"
                    )

    def _wait(self, deadline: float | None, where: str, error: Exception) -> float:
        deadline = deadline or time.monotonic() + self.patience
        if time.monotonic() > deadline:
            what = f"the server has taken no requests for {self.patience} seconds ({error})"
            raise RemoteError(what, where=where, remedy="Start it, or correct the address") from error
        time.sleep(0.5)
        return deadline
