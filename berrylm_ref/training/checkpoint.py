"""From the fp32 weights of a training to a checkpoint folder in the official format."""

import json
import shutil
from pathlib import Path

import torch

from .. import weights
from ..model import BerryLM

SHARD = "15MB"
TEXTS = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json")


def save_checkpoint(model: BerryLM, folder: str | Path, texts: str | Path) -> None:
    """Write bf16 weights (A_log and dt_bias fp32) in shards, config.json, and the files of ``texts`` that make it talk.

    What is written is the same for the same weights, byte for byte.
    """
    folder, texts = Path(folder), Path(texts)
    copy = BerryLM(model.config, dtype=torch.bfloat16, backend="torch")
    copy.load_state_dict({name: x.detach().cpu() for name, x in model.state_dict().items()})
    weights.save(copy, folder, SHARD)
    for name in TEXTS:
        if (texts / name).is_file() and texts.resolve() != folder.resolve():
            shutil.copyfile(texts / name, folder / name)
    if not (folder / "generation_config.json").is_file():
        defaults = {"eos_token_id": model.config.eos_token_id, "temperature": 0.8, "top_k": 20, "top_p": 0.95}
        (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2, sort_keys=True) + "\n")
