"""Pure functions, no state, no modules: the oracles that every kernel and every engine path is measured against.

Symbol   name in code    meaning
D        hidden_size     width of the residual stream
H, HV    heads           key heads and value heads of a linear layer; value head j reads key head j // (HV / H)
K, V     width           head sizes of keys and values
S        state           [HV, K, V], what a linear layer remembers
g        g               log-decay per value head and key channel, natural log, <= 0
beta     beta            write strength per value head, in (0, 1)
E        experts         routed experts of a layer
N, P     n, rows         sequences of a packed batch, and its packed tokens
"""
