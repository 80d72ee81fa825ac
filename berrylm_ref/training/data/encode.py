"""A conversation as the ids that inference will see, and the places to learn from."""

from ...chat.template import ChatTemplate
from ...tokenizer import Tokenizer
from .exchange import Conversation

ASSISTANT, END, THINK, THINK_CLOSE = "<|assistant|>", "<|end|>", "<think>", "</think>"


def encode(conversation: Conversation, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], list[bool]]:
    """(ids, targets): `targets[i]` says that `ids[i]` is to be predicted from the ids before it.

    Targets are what the assistant generates, `<|end|>` included: after `<think>`, or after `</think>` in a turn with an empty
    block, which the prompt closes itself. The prompt of every turn is a prefix of the ids.
    """
    ids = template.encode(conversation.messages, conversation.tools, tokenizer=tokenizer, add_generation_prompt=False)
    start, end, think, close = (tokenizer.encode(tag)[0] for tag in (ASSISTANT, END, THINK, THINK_CLOSE))
    targets = [False] * len(ids)
    at = 0
    while start in ids[at:]:
        at = ids.index(start, at) + (3 if ids[ids.index(start, at) + 2] == close else 2)
        stop = ids.index(end, at) + 1
        targets[at:stop] = [True] * (stop - at)
        at = stop
    return ids, targets
