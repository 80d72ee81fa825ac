"""Inputs for the KDA tests, and the reference they are compared with: the loop in fp64."""

import torch
from torch.nn.functional import normalize

from berrylm_ref.ops.kda import recurrent_kda

# natural-log decay per token: the smallest and the largest, drawn log-uniformly per token, head and channel
REGIMES = {
    "none": (0.0, 0.0),
    "slow": (1e-6, 1e-3),
    "mild": (1e-3, 0.2),
    "sharp": (1e-4, 20.0),
    "hard": (90.0, 150.0),  # every channel beyond -2000 in log2 over 16 tokens
}
SPLITS = {
    "129+1": [129, 1],
    "64+66": [64, 66],
    "65+65": [65, 65],
    "1+129": [1, 129],
    "127+3": [127, 3],
    "2x65": [2] * 65,
    "1x130": [1] * 130,
}


def kda_inputs(T, *, B=1, H=2, HV=4, K=8, V=12, regime="sharp", seed=0, dtype=torch.float32, sequences=None):
    """q, k (unit vectors), v, g, beta and an initial_state [sequences or B, HV, K, V], as keyword arguments of the ops."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.empty(shape, dtype=torch.float64).normal_(generator=rng)

    least, most = REGIMES[regime]
    share = torch.empty(B, T, HV, K, dtype=torch.float64).uniform_(generator=rng)
    g = -least * (most / least) ** share if least else torch.zeros(B, T, HV, K, dtype=torch.float64)
    case = {
        "q": normalize(normal(B, T, H, K), dim=-1),
        "k": normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "g": g,
        "beta": normal(B, T, HV).sigmoid(),
        "initial_state": normal(B if sequences is None else sequences, HV, K, V),
    }
    return {name: x.to(dtype) for name, x in case.items()}


def loop64(case, **options):
    """The oracle: (o, final state) of the token loop on the same values in fp64."""
    exact = {name: x.double() for name, x in case.items() if x is not None}
    return recurrent_kda(**exact, output_final_state=True, **options)


def tokens(case, begin, end):
    """The same case for tokens begin:end only, without its initial state."""
    return {name: x[:, begin:end] for name, x in case.items() if name != "initial_state"}
