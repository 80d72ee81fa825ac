"""``LLM``: a checkpoint folder that answers prompts."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..backend import Backend
from ..cache.pool import Pool
from ..cache.prefix import PrefixCache, resolve_strategy
from ..model import BerryLM, as_dtype
from ..random_weights import load_or_draw
from ..tokenizer import Tokenizer
from .engine import Engine
from .memory import plan_sizes
from .params import SamplingParams
from .ranks import Ranks
from .request import Output, Request, make_requests
from .runner import PREFILL_BUCKETS, Runner, ladder
from .sequential import run_alone

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that generation_config.json may set


class LLM:
    """Load ``folder`` and generate, many requests at a time.

    A folder without tokenizer.json works with token ids. The end tokens are the union of those that config.json and
    generation_config.json declare. ``dtype`` "float64" is for property tests: there the router has no near-ties.

    prefix_cache: "auto", "extra_buffer", "no_buffer" or "off" (see ``cache.prefix``); page_size: tokens of a KV page;
    max_running_requests: sequences in one forward; max_total_tokens: KV memory in tokens; snapshot_bytes: memory for states
    kept at prefixes, of ``snapshot_dtype`` (None: as the states); chunked_prefill_size: tokens of one forward, None is 2048, on
    a GPU 16384. overlap: schedule a step while the one before runs; None is yes on a GPU. cuda_graphs: decode in CUDA graphs;
    None is yes with the triton backend on a GPU, without them the same steps run one launch at a time. decode_buckets: the batch
    sizes of decode steps, rounded up to with padding (None: a ladder on a GPU, every size elsewhere; []: each batch built anew).
    prefill_buckets: tokens of a few short prompts together, likewise (None: up to 3072 on a GPU in bf16, none elsewhere).
    sequential: run requests one after the other through the plain loop instead, the engine's twin.
    tp: processes on this machine that share every layer, one GPU each, this one the first (see ``engine.ranks``); ``close`` ends
    the others, and so does this one's end. What they raise, or RankDied, ends them all. random_weights: a seed; the weights
    are drawn (see ``random_weights``), and of ``folder`` no more than config.json is needed.
    """

    def __init__(
        self,
        folder: str | Path | BerryLM,
        dtype: torch.dtype | str = "float32",
        device: str = "cpu",
        backend: str | Backend = "auto",
        prefix_cache: str = "auto",
        page_size: int = 16,
        max_running_requests: int = 32,
        max_total_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        snapshot_bytes: int | None = None,
        snapshot_dtype: torch.dtype | str | None = None,
        kda_intra: str | list[str] = "dyadic",
        sequential: bool = False,
        overlap: bool | None = None,
        cuda_graphs: bool | None = None,
        decode_buckets: list[int] | None = None,
        prefill_buckets: list[int] | None = None,
        tp: int = 1,
        random_weights: int | None = None,
    ):
        for name, value in (("page_size", page_size), ("max_running_requests", max_running_requests), ("tp", tp)):
            positive(name, value)
        for name, value in (("max_total_tokens", max_total_tokens), ("chunked_prefill_size", chunked_prefill_size)):
            positive(name, value, optional=True)
        for name, value in (("snapshot_bytes", snapshot_bytes), ("random_weights", random_weights)):
            positive(name, value, optional=True, least=0)
        for name, buckets in (("decode_buckets", decode_buckets), ("prefill_buckets", prefill_buckets)):
            if not isinstance(buckets, list | tuple | None):
                raise ValueError(f"LLM: {name}: expected a list of integers, got {buckets!r}")
            for bucket in buckets or []:
                positive(name, bucket)
        ready = isinstance(folder, BerryLM)  # see from_model
        if tp > 1 and (ready or sequential):
            raise ValueError(f"LLM: tp: expected 1 with {'a model in memory' if ready else 'sequential=True'}, got {tp}")
        loading = {"dtype": dtype, "device": device, "backend": backend, "kda_intra": kda_intra}
        self.ranks = Ranks(folder, tp, seed=random_weights, **loading) if tp > 1 else None
        try:
            if self.ranks:
                self.model = self.ranks.load()
            else:
                self.model = folder if ready else load_or_draw(folder, random_weights, **loading)
            self.config = self.model.config
            self.folder = None if ready else Path(folder)
            self.tokenizer = None if ready else Tokenizer.from_folder(folder)
            declared = self.config.eos_token_ids
            self.end_ids = frozenset(declared) if ready else end_token_ids(folder, declared)
            if self.tokenizer and self.tokenizer.size > self.config.vocab_size:
                most, got = self.config.vocab_size, self.tokenizer.size - 1
                raise ValueError(f"LLM: tokenizer.json: expected ids below vocab_size = {most}, got {got}")
            self._known = self.tokenizer.size if self.tokenizer else None
            self.engine = None if sequential else self._make_engine(
                prefix_cache=prefix_cache, page_size=page_size, max_running_requests=max_running_requests,
                max_total_tokens=max_total_tokens, chunked_prefill_size=chunked_prefill_size, snapshot_bytes=snapshot_bytes,
                snapshot_dtype=None if snapshot_dtype is None else as_dtype(snapshot_dtype), overlap=overlap,
                cuda_graphs=cuda_graphs, decode_buckets=decode_buckets, prefill_buckets=prefill_buckets,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _make_engine(
        self, *, prefix_cache, page_size, max_running_requests, max_total_tokens, chunked_prefill_size, snapshot_bytes,
        snapshot_dtype, overlap, cuda_graphs, decode_buckets, prefill_buckets,
    ) -> Engine:  # fmt: skip
        """Fill what is left open in the options of the engine, and build it."""
        model, ops, ranks = self.model, self.model.backend, self.ranks
        on_gpu = model.device.type == "cuda"
        can_capture = on_gpu and ops.name == "triton"  # the plain ops read lengths on the host
        if cuda_graphs and not can_capture:
            raise ValueError(f"LLM: cuda_graphs: expected backend 'triton' on a CUDA device, got {ops.name!r} on {model.device}")
        graphs = can_capture if cuda_graphs is None else cuda_graphs
        strategy = resolve_strategy(prefix_cache, boundary_states=ops.boundary_states, grid=ops.state_grid, page_size=page_size)
        sizes = plan_sizes(
            model.local,
            dtype=model.dtype,
            device=model.device,
            page_size=page_size,
            max_running_requests=max_running_requests,
            max_total_tokens=max_total_tokens,
            snapshot_bytes=snapshot_bytes,
            snapshot_dtype=snapshot_dtype,
            keep_snapshots=strategy != "off",
            free=ranks.free if ranks else None,
        )
        pool = (ranks.pool if ranks else Pool)(model.local, sizes, dtype=model.dtype, device=model.device)
        if decode_buckets is None:
            decode_buckets = ladder(max_running_requests) if on_gpu else list(range(1, max_running_requests + 1))
        budget = chunked_prefill_size or (16384 if on_gpu else 2048)
        can_pack = can_capture and model.dtype == torch.bfloat16 and model.config.head_dim % 8 == 0  # see ``paged_attention``
        # "sglang" chooses its form by the chunks of a batch: padding would count, and in a graph nobody can count
        counts = any(layer.linear_attn.intra == "sglang" for layer in model.model.layers if layer.is_linear)
        if prefill_buckets is None:
            prefill_buckets = [tokens for tokens in PREFILL_BUCKETS if tokens <= budget] if can_pack and not counts else []
        elif prefill_buckets and (counts or not ops.boundary_states):
            what = "kda_intra 'sglang'" if counts else f"backend {ops.name!r}, which hands out no boundary states"
            raise ValueError(f"LLM: prefill_buckets: expected none with {what}, got {prefill_buckets}")
        elif graphs and prefill_buckets and not can_pack:
            got = f"{model.dtype}, {model.config.head_dim}"
            raise ValueError(f"LLM: prefill_buckets: expected none in CUDA graphs unless bfloat16, head_dim 8, 16, .., got {got}")
        return Engine(
            model,
            PrefixCache(pool, strategy, ops.state_grid),
            max_running=max_running_requests,
            token_budget=budget,
            known=self._known,
            overlap=on_gpu if overlap is None else overlap,
            runner=(ranks.runner if ranks else Runner)(model, pool.caches, decode_buckets, graphs, prefill_buckets),
        )

    def close(self) -> None:
        """End the other processes of tensor parallel, if there are any; nothing runs afterwards."""
        if self.ranks:
            self.ranks.close()

    @classmethod
    def from_model(cls, model: BerryLM, **options) -> "LLM":
        """An engine around a model that is in memory already, for token ids. ``options``: those of LLM that load nothing."""
        loading = sorted(options.keys() & {"dtype", "device", "backend", "kda_intra", "random_weights"})
        if not isinstance(model, BerryLM) or loading:
            got = f"{loading[0]}, which the model has settled" if loading else type(model).__name__
            raise ValueError(f"LLM.from_model: model, options: expected a BerryLM and options of the engine, got {got}")
        return cls(model, **options)

    def generate(
        self, prompts: list[str] | list[list[int]] | str, params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Output]:
        """One output a prompt (``params.n`` of them each, prompt by prompt). Raises ValueError before anything runs."""
        if not isinstance(prompts, Iterable):
            raise ValueError(f"generate: prompts: expected a list of texts or of lists of token ids, got {prompts!r}")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        params = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"generate: params: expected one, or one for each of {len(prompts)} prompts, got {len(params)}")
        requests = [r for prompt, p in zip(prompts, params, strict=True) for r in self.requests(prompt, p)]
        for request in requests:
            self.check_fits(request)
        self.run(requests)
        return [request.output() for request in requests]

    def requests(self, prompt: str | list[int], params: SamplingParams) -> list[Request]:
        """The choices of one prompt, checked, not yet started."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"generate: params: expected SamplingParams, got {params!r}")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("generate: prompts: expected token ids, the model folder has no tokenizer.json, got text")
            if any("\ud800" <= c <= "\udfff" for c in prompt):
                raise ValueError("generate: prompts: expected Unicode text, got half a surrogate pair in it")
            prompt = self.tokenizer.encode(prompt)
        elif not isinstance(prompt, list | tuple):
            raise ValueError(f"generate: prompts: expected text or a list of token ids, got {type(prompt).__name__}")
        return make_requests(
            list(prompt),
            params,
            vocab_size=self.config.vocab_size,
            context=self.config.max_position_embeddings,
            end_ids=self.end_ids,
            tokenizer=self.tokenizer,
        )

    def stream(self, request: Request) -> Iterator[str]:
        """Run one request; yields the text of every step, "" where none became certain. Closed early, it is cancelled."""
        if self.engine is None:
            yield from run_alone(self.model, request, self._known)
            return
        self.engine.add(request)
        made = sent = 0
        try:
            while True:
                over = request.finished or self.engine.idle  # idle: someone cancelled it
                if made < len(request.output_ids) or sent < len(request.text):  # by this step, or by someone else's
                    made, text = len(request.output_ids), request.text
                    yield text[sent:]
                    sent = len(text)
                elif over:
                    return
                else:
                    self.engine.step()
        finally:
            self.engine.cancel(request)

    def check_fits(self, request: Request) -> None:
        """ValueError if ``request`` could never run, even alone."""
        if self.engine is not None:
            self.engine.scheduler.check_fits(request)

    def room(self, prompt: int) -> int:
        """How many tokens can follow ``prompt`` ones in context and KV memory; 1 where none can, so that it is refused."""
        most = self.config.max_position_embeddings
        if self.engine is not None:
            sizes = self.engine.cache.pool.sizes
            most = min(most, sizes.pages * sizes.page_size)
        return max(1, most - prompt)

    def run(self, requests: list[Request]) -> None:
        """Run checked requests to their ends, together."""
        if self.engine is None:
            for request in requests:
                for _ in run_alone(self.model, request, self._known):
                    pass
            return
        try:
            for request in requests:
                self.engine.add(request)
            while not all(request.finished for request in requests):
                self.engine.step()
        finally:
            for request in requests:  # an interrupt must not leave them holding pages
                self.engine.cancel(request)


def generation_config(folder: str | Path) -> dict[str, Any]:
    """generation_config.json of ``folder``, {} if it has none."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """The sampling parameters that generation_config.json sets; ValueError for values that no request could have."""
    config = generation_config(folder)
    found = {name: config[name] for name in SAMPLING_DEFAULTS if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{folder}: generation_config.json: {error}") from error
    return found


def end_token_ids(folder: str | Path, declared: tuple[int, ...]) -> frozenset[int]:
    """The union of the ids in config.json (``declared``) and generation_config.json: neither replaces the other."""
    more = generation_config(folder).get("eos_token_id")
    more = [] if more is None else [more] if type(more) is int else more
    if not isinstance(more, list) or not all(type(i) is int for i in more):  # true is no token id
        raise ValueError(f"{folder}: generation_config.json: eos_token_id: expected a token id or a list of them, got {more!r}")
    return frozenset(declared) | frozenset(more)


def positive(name: str, value: int | None, optional: bool = False, least: int = 1) -> None:
    if not (optional and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"LLM: {name}: expected an integer, {least} or more, got {value!r}")
