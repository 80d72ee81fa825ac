"""BerryLM: embeddings, layers, head; one forward over a packed batch for prefill, any chunk, decode and their mixtures."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from . import weights
from .backend import Backend, get_backend
from .cache.batch import Batch
from .config import BerryLMConfig
from .layers import Layer, Norm, random_weight
from .ops.kda import INTRA
from .ops.rope import rope_angles
from .sharding import Shard

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ModelOutput:
    """logits [B, T, vocab_size]; hidden_states: a [B, T, D] for each layer, the stream as that layer returns it."""

    logits: Tensor
    hidden_states: list[Tensor]


class Decoder(nn.Module):
    """Holder of everything under ``model.`` in the checkpoint."""

    def __init__(self, config: BerryLMConfig):
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*shape, _weight=random_weight(*shape))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)


class BerryLM(nn.Module):
    """The whole model. ``backend`` chooses the ops, ``kda_intra`` the scores of the linear layers (one name, or one a layer).

    ``shard``: this process holds one rank's part of it, and every rank of the process group calls it alike; None: all of it.
    """

    def __init__(
        self,
        config: BerryLMConfig,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        backend: str | Backend = "auto",
        kda_intra: str | list[str] = "dyadic",
        shard: Shard | None = None,
    ):
        super().__init__()
        dtype = as_dtype(dtype)
        self.config, self.shard = config, shard or Shard(config)
        self.backend = self.shard.backend(get_backend(backend, device, dtype))
        with torch.device(device):
            c = self.local
            self.model = Decoder(c)
            self.lm_head = None if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.to(dtype)
        self.requires_grad_(self.shard.size == 1)  # what ranks exchange has no history
        self.set_kda_intra(kda_intra)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str = "cpu",
        backend: str | Backend = "auto",
        kda_intra: str | list[str] = "dyadic",
        shard: Shard | None = None,
    ) -> "BerryLM":
        """Load config.json and the safetensors beside it (single file or index), tensor by tensor, cast to ``dtype``.

        Of a ``shard`` only its own slices are read.
        Raises ValueError naming the file or the tensor where they do not fit; nothing is used before everything fits.
        """
        dtype, device = as_dtype(dtype), as_device(device)
        backend = get_backend(backend, device, dtype)  # refused before anything is read
        config = BerryLMConfig.from_pretrained(folder)
        files = weights.open_checkpoint(folder)
        model = cls(config, dtype=dtype, device="meta", backend=backend, kda_intra=kda_intra, shard=shard)
        plan = weights.plan(files, model.shard, dict(model.named_parameters()))
        model.to_empty(device=device)
        weights.load(plan, model.shard, dict(model.named_parameters()))
        return model.eval()

    def save_pretrained(self, folder: str | Path, max_shard_size: str | int = "2GB") -> None:
        """Write config.json and model.safetensors, or shards of at most ``max_shard_size`` with an index."""
        weights.save(self, folder, max_shard_size)

    def set_kda_intra(self, intra: str | list[str]) -> None:
        """How each linear layer forms the scores inside a chunk: see ``ops.kda.chunk_kda``."""
        layers = [layer.linear_attn for layer in self.model.layers if layer.is_linear]
        choices = [intra] * len(layers) if isinstance(intra, str) else list(intra)
        if len(choices) != len(layers):
            raise ValueError(f"BerryLM: kda_intra: expected {len(layers)} names, one a linear layer, got {len(choices)}")
        for choice in choices:
            if choice not in INTRA:
                raise ValueError(f"BerryLM: kda_intra: expected one of {INTRA}, got {choice!r}")
        for layer, choice in zip(layers, choices, strict=True):
            layer.intra = choice

    @property
    def local(self) -> BerryLMConfig:
        """The sizes of what is held here; without a shard those of the whole model."""
        return self.shard.local

    @property
    def head(self) -> Tensor:
        """[vocab_size, D], or this rank's rows of it; tied, it is the embedding itself."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def forward(self, input_ids: Tensor, return_hidden_states: bool = False) -> Tensor | ModelOutput:
        """input_ids [B, T] int64, every sequence whole -> logits [B, T, vocab_size] in the model dtype."""
        self.check_ids(input_ids)
        logits, hidden = self.run(Batch.stateless(input_ids.to(self.device)), keep_hidden=return_hidden_states)
        logits = logits.view(*input_ids.shape, self.config.vocab_size)
        if not return_hidden_states:
            return logits
        return ModelOutput(logits, [x.view(*input_ids.shape, self.config.hidden_size) for x in hidden])

    def run(self, batch: Batch, keep_hidden: bool = False) -> tuple[Tensor, list[Tensor]]:
        """One forward: logits [rows asked for, vocab_size], and each layer's stream [P, D] if they are kept."""
        c, ops = self.config, self.backend
        h = self.shard.embed(batch.input_ids, self.model.embed_tokens.weight)  # [P, D]
        committed = h.new_empty(c.attn_res_commits, *h.shape)  # block 0 is the embeddings
        committed[0] = h
        rope = rope_angles(batch.positions, c.rotary_dim, c.rope_theta, h.dtype)
        blocks, seen, hidden = 1, {True: 0, False: 0}, []
        for i, layer in enumerate(self.model.layers):
            h = layer(h, committed[:blocks], batch, seen[layer.is_linear], rope, ops)
            seen[layer.is_linear] += 1
            if c.attn_res_block_size and (i + 1) % c.attn_res_block_size == 0:
                committed[blocks] = h
                blocks += 1
            if keep_hidden:
                hidden.append(h)
        x = ops.rms_norm(h[batch.logit_rows], self.model.norm.weight, c.rms_norm_eps)
        return self.shard.gather(linear(x, self.head)), hidden

    def check_ids(self, input_ids: Tensor) -> None:
        is_tensor = isinstance(input_ids, Tensor)
        if not is_tensor or input_ids.dim() != 2 or input_ids.dtype != torch.int64:
            got = f"{tuple(input_ids.shape)} {input_ids.dtype}" if is_tensor else repr(input_ids)
            raise ValueError(f"BerryLM: input_ids: expected an int64 tensor [B, T], got {got}")
        if input_ids.shape[1] > self.config.max_position_embeddings:
            limit = self.config.max_position_embeddings
            raise ValueError(f"BerryLM: input_ids: expected at most {limit} tokens, got {input_ids.shape[1]}")
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.config.vocab_size:
            got = f"{int(input_ids.min())} .. {int(input_ids.max())}"
            raise ValueError(f"BerryLM: input_ids: expected ids in 0 .. {self.config.vocab_size - 1}, got {got}")


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch dtype from itself or its name."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {sorted(DTYPES)}, got {dtype!r}")
    return found


def as_device(device: torch.device | str) -> torch.device:
    """A torch device from itself or its name; ValueError where it is not there or holds no numbers."""
    try:
        found = torch.empty(0, device=torch.device(device)).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch's ways to say so
        raise ValueError(f"device: expected one that is here, as 'cpu', got {device!r}: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise ValueError(f"device: expected one with memory, as 'cpu', got {device!r}")
    return found
