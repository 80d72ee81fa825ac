"""BerryLM reference: a hybrid of Kimi Delta Attention and gated full attention, from the recurrence to a served token."""

from .config import BerryLMConfig
from .model import BerryLM

__all__ = ["BerryLM", "BerryLMConfig"]
