"""How far a port is from the reference, and where it leaves it.

``served`` asks a server over HTTP and scores its tokens with the plain torch model (client, completions, generate, launch,
reference, score, report). ``layers`` puts two implementations side by side inside the model (sides, lockstep, layers, growth).
The floor, bf16 torch against the reference on the same ids, is measured beside every number.
"""
