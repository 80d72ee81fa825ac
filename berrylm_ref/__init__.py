"""BerryLM reference: a hybrid of Kimi Delta Attention and gated full attention, from the recurrence to a served token."""

from .config import BerryLMConfig
from .engine.llm import LLM
from .engine.params import SamplingParams
from .model import BerryLM

__all__ = ["LLM", "BerryLM", "BerryLMConfig", "SamplingParams"]
