"""Dispersion instead of spread.

For a Gaussian cloud of deviation σ in the plane the spread is √2 times the dispersion, so most policies
come in the same order. Outliers make the difference. With one of n points at distance 1 and the others
at 0, the mean lies at 1/n: dispersion 2·(n − 1)/n², spread 2/n. Two camps of equal size: dispersion 1/2
of their distance, spread about 1/2 of it as well.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def dispersion(descriptors: Float[Array, "episodes d"]) -> Float[Array, ""]:
    return jnp.mean(jnp.sqrt(jnp.sum((descriptors - descriptors.mean(axis=0)) ** 2, axis=-1)))


def disagreement() -> tuple[Float[Array, "n d"], Float[Array, "m d"]]:
    line = jnp.linspace(0.0, 1.0, 10)[:, None]  # evenly: spread 0.407, dispersion 0.278
    outlier = jnp.zeros((10, 1)).at[0].set(1.0)  # one of ten: spread 0.2, dispersion 0.18
    # Scaled so that the outlier's cloud is between the two ratios 0.407 / 0.2 and 0.278 / 0.18.
    scale = 1.75
    return scale * outlier, line
