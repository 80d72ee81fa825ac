"""From requests to tokens: sampling, detokenisation, the loop that runs requests."""
