"""How the shipped checkpoint is made: its data, its tokenizer and its training."""
