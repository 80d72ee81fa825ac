"""What the model remembers between calls: KV pages, state slots, and the tree that finds them again."""
