"""JAX on the CPU: a compiled step goes on with the same compiled code, state and random key."""

import jax
import jax.numpy as jnp
from common import run

key = jax.random.key(7)
weights = jnp.zeros((64, 64))
total = 0.0


@jax.jit
def step(weights, key):
    key, part = jax.random.split(key)
    return 0.9 * weights + jax.random.normal(part, weights.shape), key


def plain(count: int) -> float:
    w, k = jnp.zeros((64, 64)), jax.random.key(7)
    for _ in range(count):
        w, k = step(w, k)
    return float(w.sum())


def check(n: int) -> None:
    global weights, key
    weights, key = step(weights, key)
    if n % 10 == 0:
        assert float(weights.sum()) == plain(n), "the state differs from that of a straight run"


run(check)
