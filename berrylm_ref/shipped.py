"""The checkpoint that comes with the package: where it lies and what a server calls it."""

from pathlib import Path

SHIPPED_NAME = "berrylm-nano"


def shipped_checkpoint() -> Path:
    """Folder of the shipped checkpoint: weights, config, tokenizer, chat template, and the log of its training."""
    return Path(__file__).parent / "checkpoints" / "nano"


def served_name(folder: str | Path) -> str:
    """What a server calls the model in ``folder``: the folder's name, and the shipped one by its full name."""
    folder = Path(folder).resolve()
    return SHIPPED_NAME if folder == shipped_checkpoint().resolve() else folder.name
