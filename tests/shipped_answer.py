"""The recorded greedy answer of the shipped checkpoint. Run this file to record it again after a training.

    python tests/shipped_answer.py      # writes tests/training/nano_answer.json
"""

import json
from pathlib import Path

from berrylm_ref import LLM, SamplingParams
from berrylm_ref.chat.template import ChatTemplate
from berrylm_ref.shipped import shipped_checkpoint
from berrylm_ref.training.evaluate import weights_hash

RECORD = Path(__file__).parent / "training" / "nano_answer.json"
QUESTION = "Freya opens 36 drawers with 11 tiles each and finds 2990 more under the table. How many tiles is that?"
ANSWER = 36 * 11 + 2990
MARGIN = 0.05  # nats between the first and the second choice; other machines differ by 1e-5


def prompt_ids(tokenizer, folder=None):
    template = ChatTemplate.from_folder(folder or shipped_checkpoint())
    return template.encode([{"role": "user", "content": QUESTION}], tokenizer=tokenizer, enable_thinking=True)


def greedy(llm, prompt):
    """One output with the logprobs of the two best tokens at every place."""
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=320, logprobs=2))
    return output


def narrowest(output):
    """The smallest gap between the best and the second token."""
    return min(one.top[0][1] - one.top[1][1] for one in output.logprobs)


def main():
    llm = LLM(shipped_checkpoint())
    prompt = prompt_ids(llm.tokenizer)
    output = greedy(llm, prompt)
    gap = narrowest(output)
    if not output.text.endswith(f"The answer is {ANSWER}.") or gap < MARGIN:
        raise SystemExit(f"expected the answer {ANSWER} and gaps above {MARGIN}, got {output.text!r} and {gap:.3f}")
    record = {
        "weights_sha256": weights_hash(shipped_checkpoint()),
        "prompt_ids": prompt,
        "output_ids": output.token_ids,
        "text": output.text,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RECORD.name}: {len(output.token_ids)} tokens, narrowest gap {gap:.2f} nats")


if __name__ == "__main__":
    main()
