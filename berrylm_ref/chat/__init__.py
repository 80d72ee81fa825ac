"""Chat: from generated text to reasoning, content and tool calls in the model's text format."""

from berrylm_ref.chat.reasoning import ReasoningParser
from berrylm_ref.chat.tools import ToolCallParser

__all__ = ["ReasoningParser", "ToolCallParser"]
