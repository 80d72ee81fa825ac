"""The official code as a side, where the installed transformers has the model."""

from pathlib import Path

import torch
from torch import Tensor

from .precision import full_fp32


class TransformersSide:
    """Whole prompts only: no pieces, no decoding, and no ops to look into."""

    def __init__(self, name: str, folder: str | Path, dtype: torch.dtype, device: str = "cpu"):
        try:
            from transformers import AutoModelForCausalLM, __version__
        except ImportError as error:
            raise ValueError(f"side {name!r}: expected transformers to be installed, got: {error}") from error
        try:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        except (ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"side {name!r}: expected a transformers that has the model, transformers {__version__} says: {reason}"
            ) from error
        self.name, self.dtype, self.device = name, dtype, device
        self.layers = self.model.model.layers

    @full_fp32()
    @torch.inference_mode()
    def whole(self, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits [T, vocab_size] and the stream [T, D] behind every layer."""
        hidden: list[Tensor] = []

        def keep(module, args, output):
            hidden.append((output[0] if isinstance(output, tuple) else output)[0])

        hooks = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            found = self.model(torch.tensor([ids], device=self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return found.logits[0], hidden
